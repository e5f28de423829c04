"""Where a server is, as people type it."""

from __future__ import annotations

WILDCARD_HOSTS = ("0.0.0.0", "::", "")


def base_url(host: str, port: int) -> str:
    """The address to type; a server on every interface is reached at the loopback one."""
    shown = "127.0.0.1" if host in WILDCARD_HOSTS else host
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def announcement(host: str, port: int, model_name: str, *, has_operator_routes: bool) -> str:
    """The line that a server prints when it is ready."""
    base = base_url(host, port)
    operator = f" Live page: {base}/ui, metrics: {base}/metrics." if has_operator_routes else ""
    return f"pagedcore serves {model_name} at {base}/v1.{operator} Stop: Ctrl-C"
