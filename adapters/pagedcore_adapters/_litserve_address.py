"""Where a LitServe server may listen, checked before anything is loaded."""

from __future__ import annotations

import socket
import sys

from pagedcore.errors import ConfigError

HOSTS = ("127.0.0.1", "0.0.0.0", "::")
"""What LitServe takes, and the ports."""
PORTS = range(1024, 65536)


def check_address(host: str, port: int) -> None:
    """Raise `ConfigError` unless a server can listen there now."""
    if host not in HOSTS:
        raise ConfigError(f"host is {host!r} and LitServe listens on one of {', '.join(HOSTS)} only; use one of these.")
    if port not in PORTS:
        raise ConfigError(f"port is {port} and LitServe takes ports from {PORTS[0]} to {PORTS[-1]}; choose another port.")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        if sys.platform != "win32":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"port {port} of {host} cannot be used: {error.strerror}; choose another port.") from error
