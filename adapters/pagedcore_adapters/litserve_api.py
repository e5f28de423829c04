"""A LitServe endpoint whose workers run pagedcore engines: `build_server(config).run(port=8000)`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedcore_adapters._extras import missing_extra

try:
    import litserve as _litserve  # noqa: F401
except ImportError as error:
    raise missing_extra("litserve", "litserve", error) from error

from pagedcore import EngineConfig
from pagedcore.errors import ConfigError
from pagedcore.openai import ServerSettings
from pagedcore.routing.router import RoutingPolicy
from pagedcore.warm_up import read_warm_up_file
from pagedcore_adapters._litserve_placement import Devices, Placement, choose_placement
from pagedcore_adapters._litserve_plain_api import PagedCoreAPI, add_metrics_route
from pagedcore_adapters._litserve_processes import stop_on_signals
from pagedcore_adapters._litserve_server import PagedServer, ServerOptions
from pagedcore_adapters._litserve_worker_api import WorkerAPI

__all__ = ["PagedCoreAPI", "PagedServer", "RoutingPolicy", "add_metrics_route", "build_server", "stop_on_signals"]


def build_server(
    config: EngineConfig | Mapping[str, Any] | None = None,
    *,
    settings: ServerSettings | None = None,
    warmup_file: str | Path | None = None,
    workers_per_device: int = 1,
    devices: Devices = "auto",
    num_api_servers: int | None = None,
    routing: RoutingPolicy | None = None,
    drain_timeout_s: float = 30.0,
    socket: str | Path | None = None,
) -> PagedServer:
    """A server to `run`: one engine a worker, each with its own KV pool and metrics (label `engine`).

    A request goes to the worker that has its prefix cached, within the bounds of `routing`. A worker that ends is started again.
    `num_api_servers` is the number of HTTP processes, by default one a worker. On SIGTERM open answers have `drain_timeout_s` to end.
    `socket` is that of an engine which runs already (`pagedcore engine --socket PATH`): all HTTP processes, of any number of servers,
    share it, and none is made here.

    Raises `ConfigError` for settings that cannot work together. Loads neither the model nor torch in this process.
    """
    options = ServerOptions(
        workers_per_device=workers_per_device, num_api_servers=num_api_servers, routing=routing, drain_timeout_s=drain_timeout_s
    )
    settings = settings or ServerSettings()
    if socket is not None:
        return _attached_server(socket, settings, options, is_plain=(config, warmup_file, devices, routing) == (None, None, "auto", None))
    engine_config = config if isinstance(config, EngineConfig) else EngineConfig.from_mapping(config or {})
    prompts = read_warm_up_file(warmup_file) if warmup_file is not None else []
    placement = choose_placement(engine_config, devices, workers_per_device)
    return PagedServer(WorkerAPI(engine_config, prompts), settings, placement, options)


def _attached_server(socket: str | Path, settings: ServerSettings, options: ServerOptions, *, is_plain: bool) -> PagedServer:
    """A server of an engine that runs elsewhere. Its one worker only holds the place that LitServe has for one."""
    if not is_plain or options.workers_per_device != 1:
        raise ConfigError(
            f"The engine at {str(socket)!r} has its config, device and warm-up prompts from where it was started, and is one; "
            "give no config, devices, warmup_file, routing and workers_per_device here."
        )
    return PagedServer(WorkerAPI(socket=socket), settings, Placement("cpu", 1), options)
