"""A LitServe endpoint whose workers run pagedcore engines: `build_server(config).run(port=8000)`."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.managers import SyncManager
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
from pagedcore.errors import EngineError, PagedCoreError
from pagedcore.openai import ServerSettings, add_error_handlers, build_router
from pagedcore.warm_up import WarmUpPrompt, as_token_ids, read_warm_up_file
from pagedcore_adapters._litserve_address import check_address
from pagedcore_adapters._litserve_client import WorkerClient, WorkerLost
from pagedcore_adapters._litserve_hooks import HookedServer, current_worker_id, envelope
from pagedcore_adapters._litserve_placement import Devices, Placement, choose_placement
from pagedcore_adapters._litserve_processes import end_processes, handler_of_signals
from pagedcore_adapters._litserve_worker import ControlQueue, WorkerBridge, WorkerFacts
from pagedcore_adapters._prometheus_dir import engine_label, ensure_multiprocess_dir

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
        def send(queue_id: int, reply: Any) -> None:
            transport.send(envelope(reply, worker_id), queue_id)

        engine = lit_api.engine
        bridge = WorkerBridge(engine.loop, lit_api.controls[worker_id], send, engine.inspect_sync)
        # A supervisor may signal every process of the server at once: open answers end first all the same.
        signal.signal(signal.SIGTERM, lambda *_: bridge.stop_when_idle())
        bridge.serve()


class PagedCoreAPI(LitAPI):
    """Builds one engine in each worker. Owns what the workers share with the API servers."""

    engine: AsyncEngine
    """Of this worker process; absent elsewhere."""

    def __init__(self, config: EngineConfig, warm_up_prompts: Sequence[WarmUpPrompt] = ()) -> None:
        super().__init__(spec=PagedSpec(), loop=PagedLoop())
        self.config = config
        self.warm_up_prompts = tuple(warm_up_prompts)
        self.controls: list[ControlQueue] = []
        self.facts: Any = {}
        self.failures: Any = {}

    def setup(self, device: str) -> None:
        """Load the model and warm up. The main process is told of an error of ours, raises it, and the server does not start."""
        worker_id = current_worker_id()
        config = self.config.replace(metrics_instance=engine_label(self.config, worker_id))
        try:
            self.engine = self.make_engine(config if device == "cpu" else config.replace(device=device))
            self.engine.warm_up([as_token_ids(prompt, self.engine.text) for prompt in self.warm_up_prompts])
        except PagedCoreError as error:
            self.failures[worker_id] = error
            raise SystemExit(1) from error  # anything else would be logged by LitServe as a traceback
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
        self._ended_by_itself: list[str] = []
        self._on_ready: Callable[[], None] | None = None
        self._num_signals = 0
        self._is_ending = False
        self._manager: SyncManager | None = None
        self.app.include_router(build_router(self._client, replace(settings, adapter="litserve")))
        add_error_handlers(self.app)

    def run(self, host: str = "0.0.0.0", port: int = 8000, *, on_ready: Callable[[], None] | None = None, **options: Any) -> None:
        """Serve until SIGINT or SIGTERM; a second one does not wait for open answers. `on_ready` is called when a worker is warm.

        Raises `ConfigError` for an address that cannot be used, the error of a worker that could not start, and
        `EngineError` when one of the processes ended by itself.
        """
        check_address(host, port)
        self._on_ready = on_ready
        options = {"num_api_servers": self._num_api_servers, "generate_client_file": False, "log_level": "warning", **options}
        others = set(multiprocessing.active_children())
        with handler_of_signals(self._stop):
            try:
                super().run(host=host, port=port, **options)
            except (KeyboardInterrupt, EOFError, OSError):
                if not (self._num_signals or self._ended_by_itself):
                    raise
            finally:
                self._is_ending = True
                if self._manager is not None:
                    self._manager.shutdown()
                end_processes(set(multiprocessing.active_children()) - others, STOP_TIMEOUT_S if self._num_signals < 2 else 0.0)
        if self._ended_by_itself and not self._num_signals:
            raise EngineError(f"{self._ended_by_itself[0]} So the server stopped; see the log above.")

    def _stop(self, *_: object) -> None:
        """A signal came. Forked children just end."""
        if multiprocessing.parent_process() is not None:
            raise SystemExit(0)
        self._num_signals += 1
        if not self._is_ending:
            raise KeyboardInterrupt

    def on_manager(self, manager: SyncManager, num_workers: int, num_api_servers: int) -> None:
        self._manager = manager
        self.lit_api.controls = [manager.Queue() for _ in range(num_workers)]
        self.lit_api.facts, self.lit_api.failures = manager.dict(), manager.dict()
        self._queue_ids = range(num_api_servers)

    def on_starting(self, dead_workers: dict[int, int | None]) -> None:
        failures = dict(self.lit_api.failures)
        if failures:
            raise failures[min(failures)]
        for worker_id, exit_code in dead_workers.items():
            hint = "it was killed, perhaps for its memory" if exit_code == -signal.SIGKILL else "see the log above"
            raise EngineError(f"Worker process {worker_id} ended with exit code {exit_code} before it was ready; {hint}.")

    def on_serving(self) -> None:
        if self._on_ready is not None:
            self._on_ready()

    def on_api_server_death(self, queue_id: int) -> None:
        self._ended_by_itself.append(f"HTTP process {queue_id} has ended by itself.")

    def on_worker_death(self, worker_id: int) -> None:
        failure = self.lit_api.failures.get(worker_id)
        reason = "has ended by itself." if failure is None else f"could not start: {failure}"
        self._ended_by_itself.append(f"Worker process {worker_id} {reason}")
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
