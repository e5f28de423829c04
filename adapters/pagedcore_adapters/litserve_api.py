"""A LitServe endpoint whose workers run pagedcore engines: `build_server(config).run(port=8000)`."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from multiprocessing.managers import SyncManager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pagedcore_adapters._extras import missing_extra

try:
    from litserve import LitAPI
except ImportError as error:
    raise missing_extra("litserve", "litserve", error) from error
from litserve.loops import LitLoop
from litserve.specs.base import LitSpec

from pagedcore import AsyncEngine, EngineConfig
from pagedcore.async_engine import read_warm_up_file
from pagedcore.errors import EngineError
from pagedcore.openai import ServerSettings, add_error_handlers, build_router
from pagedcore_adapters._litserve_client import WorkerClient, WorkerLost
from pagedcore_adapters._litserve_hooks import HookedServer, current_worker_id, envelope
from pagedcore_adapters._litserve_placement import Devices, Placement, choose_placement
from pagedcore_adapters._litserve_worker import ControlQueue, WorkerBridge, WorkerFacts
from pagedcore_adapters._prometheus_dir import ensure_multiprocess_dir

LITSERVE_HEALTH_PATH = "/litserve/health"
"""LitServe's own health route stands aside: /health and /ready are the router's."""
STOP_TIMEOUT_S = 5.0


class PagedSpec(LitSpec):
    """Keeps LitServe from adding a route of its own; ours are on its app already."""

    def __init__(self) -> None:
        super().__init__()
        self.api_path = "/v1/chat/completions"

    @property
    def stream(self) -> bool:
        return True


class PagedLoop(LitLoop):
    """The body of a worker process: its engine, fed from its own control queue."""

    def __call__(self, lit_api: PagedCoreAPI, device: str, worker_id: int, request_queue: Any, transport: Any, *unused: Any) -> None:
        def send(queue_id: int, updates: list[Any]) -> None:
            transport.send(envelope(updates, worker_id), queue_id)

        WorkerBridge(lit_api.engine.loop, lit_api.controls[worker_id], send).serve()


class PagedCoreAPI(LitAPI):
    """Builds one engine in each worker. Owns what the workers share with the API servers."""

    engine: AsyncEngine
    """Of this worker process; absent elsewhere."""

    def __init__(self, config: EngineConfig, warm_up_prompts: Sequence[str] = ()) -> None:
        super().__init__(spec=PagedSpec(), loop=PagedLoop())
        self.config = config
        self.warm_up_prompts = tuple(warm_up_prompts)
        self.controls: list[ControlQueue] = []
        self.facts: Any = {}

    def setup(self, device: str) -> None:
        """Load the model and warm up. Raises what building an engine raises; the server does not start then."""
        worker_id = current_worker_id()
        config = self.config.replace(metrics_instance=str(worker_id))
        self.engine = self.make_engine(config if device == "cpu" else config.replace(device=device))
        self.engine.warm_up(self.warm_up_prompts)
        self.facts[worker_id] = WorkerFacts(plan=self.engine.plan, info=self.engine.info)

    def make_engine(self, config: EngineConfig) -> AsyncEngine:
        """The engine of this worker process."""
        return AsyncEngine(config)


class PagedServer(HookedServer):
    """A LitServer with the router of `pagedcore.openai`. Owns the processes that `run` starts: none outlives it."""

    def __init__(
        self, lit_api: PagedCoreAPI, settings: ServerSettings, placement: Placement, *, workers_per_device: int, num_api_servers: int | None
    ) -> None:
        super().__init__(
            lit_api,
            accelerator=placement.accelerator,
            devices=placement.devices,
            workers_per_device=workers_per_device,
            timeout=False,
            healthcheck_path=LITSERVE_HEALTH_PATH,
        )
        self._client = WorkerClient()
        self._num_api_servers = num_api_servers
        self._dead_workers: list[int] = []
        self.app.include_router(build_router(self._client, replace(settings, adapter="litserve")))
        add_error_handlers(self.app)

    def run(self, host: str = "0.0.0.0", port: int = 8000, **options: Any) -> None:
        """Serve until SIGINT or SIGTERM. Raises `EngineError` when a worker process ended by itself."""
        options = {"num_api_servers": self._num_api_servers, "generate_client_file": False, "log_level": "warning", **options}
        others = set(multiprocessing.active_children())
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _stop_on_sigterm)
        try:
            super().run(host=host, port=port, **options)
        except (EOFError, OSError) as error:
            if not self._dead_workers:
                raise
            raise EngineError(f"Worker process {self._dead_workers[0]} has ended by itself, so the server stopped; see its log.") from error
        finally:
            _end_processes(set(multiprocessing.active_children()) - others)

    def on_manager(self, manager: SyncManager, num_workers: int, num_api_servers: int) -> None:
        self.lit_api.controls = [manager.Queue() for _ in range(num_workers)]
        self.lit_api.facts = manager.dict()
        self._queue_ids = range(num_api_servers)

    def on_worker_death(self, worker_id: int) -> None:
        self._dead_workers.append(worker_id)
        for queue_id in self._queue_ids:
            self.send_to_api_server(queue_id, WorkerLost(worker_id))

    def on_api_start(self, queue_id: int) -> None:
        self._client.start(queue_id, self.lit_api.controls, self.lit_api.facts)

    def on_reply(self, payload: Any) -> None:
        self._client.receive(payload)


def build_server(
    config: EngineConfig | Mapping[str, Any] | None = None,
    *,
    settings: ServerSettings | None = None,
    warmup_file: str | Path | None = None,
    workers_per_device: int = 1,
    devices: Devices = "auto",
    num_api_servers: int | None = None,
) -> PagedServer:
    """A server to `run`: one engine a worker, each with its own KV pool and metrics (label `engine`).

    `num_api_servers` is the number of HTTP processes, by default one a worker. Raises `ConfigError` for settings that
    cannot work together. Loads neither the model nor torch in this process.
    """
    ensure_multiprocess_dir()
    engine_config = config if isinstance(config, EngineConfig) else EngineConfig.from_mapping(config or {})
    prompts = read_warm_up_file(warmup_file) if warmup_file is not None else []
    return PagedServer(
        PagedCoreAPI(engine_config, prompts),
        settings or ServerSettings(),
        choose_placement(engine_config, devices, workers_per_device),
        workers_per_device=workers_per_device,
        num_api_servers=num_api_servers,
    )


def _stop_on_sigterm(signum: int, frame: object) -> None:
    """Make SIGTERM what SIGINT is: LitServe leaves its processes behind otherwise. Forked children just end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt if multiprocessing.parent_process() is None else SystemExit(0)


def _end_processes(processes: Set[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(STOP_TIMEOUT_S)
        if process.is_alive():
            process.kill()
