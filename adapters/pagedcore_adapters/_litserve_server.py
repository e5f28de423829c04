"""The LitServer of `build_server`: OpenAI's routes in its API servers, an engine in each of its workers."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.managers import SyncManager
from multiprocessing.process import BaseProcess
from typing import Any

from pagedcore.errors import EngineError
from pagedcore.http.address import announcement
from pagedcore.openai import ServerSettings, add_error_handlers, build_router
from pagedcore.remote.restarts import Restarts
from pagedcore.routing.router import RoutingPolicy
from pagedcore_adapters._litserve_address import check_address
from pagedcore_adapters._litserve_attached import AttachedClient
from pagedcore_adapters._litserve_client import WorkerClient
from pagedcore_adapters._litserve_hooks import HookedServer
from pagedcore_adapters._litserve_messages import Drain, News, Traffic, WorkerFacts, WorkerLost
from pagedcore_adapters._litserve_placement import Placement
from pagedcore_adapters._litserve_processes import end_if_child, end_processes, handler_of_signals
from pagedcore_adapters._litserve_worker_api import WorkerAPI
from pagedcore_adapters._prometheus_dir import forget_process

LITSERVE_HEALTH_PATH = "/litserve/health"
"""LitServe's own health route stands aside: /health and /ready are the router's."""
STOP_TIMEOUT_S = 5.0
POLL_S = 0.05

logger = logging.getLogger("pagedcore.litserve")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What a `PagedServer` is told beside its API, its settings and its devices."""

    workers_per_device: int = 1
    num_api_servers: int | None = None
    routing: RoutingPolicy | None = None
    drain_timeout_s: float = 30.0


class PagedServer(HookedServer):
    """A LitServer with the router of `pagedcore.openai`. Owns the processes that `run` starts: none outlives it."""

    def __init__(self, lit_api: WorkerAPI, settings: ServerSettings, placement: Placement, options: ServerOptions) -> None:
        super().__init__(
            lit_api,
            accelerator=placement.accelerator,
            devices=placement.devices,
            workers_per_device=options.workers_per_device,
            timeout=False,
            healthcheck_path=LITSERVE_HEALTH_PATH,
        )
        self._options = options
        socket = lit_api.socket
        self._client: WorkerClient | AttachedClient = WorkerClient(options.routing) if socket is None else AttachedClient(socket)
        self._has_operator_routes = settings.allow_operator_routes
        self._ended_by_itself: list[str] = []
        self._on_ready: Callable[[], None] | None = None
        self._num_signals = 0
        self._is_ending = False
        self._manager: SyncManager | None = None
        self._restarts: defaultdict[int, Restarts] = defaultdict(Restarts)
        """Worker -> how often it has failed."""
        self.app.include_router(build_router(self._client.engine_client, replace(settings, adapter="litserve")))
        add_error_handlers(self.app, settings.cors_origins)

    def run(self, host: str = "0.0.0.0", port: int = 8000, *, on_ready: Callable[[], None] | None = None, **options: Any) -> None:
        """Serve until SIGINT or SIGTERM; a second one does not wait for open answers. `on_ready` is called when a worker is warm;
        without it one line is printed: where the server is.

        Raises `ConfigError` for an address that cannot be used, the error of a worker that could not start, and
        `EngineError` when an HTTP process ended by itself, or the last worker cannot be started again.
        """
        check_address(host, port)
        self._on_ready = on_ready or partial(self._announce, host, port)
        defaults = {"num_api_servers": self._options.num_api_servers, "generate_client_file": False, "log_level": "warning"}
        others = set(multiprocessing.active_children())
        with handler_of_signals(self._stop):
            try:
                super().run(host=host, port=port, **{**defaults, **options})
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

    def _announce(self, host: str, port: int) -> None:
        facts: WorkerFacts = next(iter(self.lit_api.facts.values()))
        line = announcement(host, port, facts.info.model_names[0], has_operator_routes=self._has_operator_routes)
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def _stop(self, *_: object) -> None:
        """A signal came."""
        end_if_child()
        self._num_signals += 1
        if not self._is_ending:
            raise KeyboardInterrupt

    # ---- in the main process

    def on_manager(self, manager: SyncManager, num_workers: int, num_api_servers: int) -> None:
        self._manager = manager
        api: WorkerAPI = self.lit_api
        api.controls = [manager.Queue() for _ in range(num_workers)]
        api.incarnations = [0] * num_workers
        api.num_api_servers = num_api_servers
        api.facts, api.ready, api.failures = manager.dict(), manager.dict(), manager.dict()
        self._drained = manager.dict()

    def on_starting(self, dead_workers: dict[int, int | None]) -> None:
        failures = self.lit_api.failures.copy()
        if failures:
            raise failures[min(failures)]
        for worker_id, exit_code in dead_workers.items():
            hint = "it was killed, perhaps for its memory" if exit_code == -signal.SIGKILL else "see the log above"
            raise EngineError(f"Worker process {worker_id} ended with exit code {exit_code} before it was ready; {hint}.")

    def on_serving(self) -> None:
        if self._on_ready is not None:
            self._on_ready()

    def on_worker_death(self, worker_id: int, process: BaseProcess) -> float | None:
        if self._num_signals:
            return None  # it got the signal, too
        ready_s = self.lit_api.ready.pop(worker_id, None)
        failure = self.lit_api.failures.pop(worker_id, None)
        reason = f"exit code {process.exitcode}" if failure is None else str(failure)
        assert process.pid is not None, "it has run"
        num_lost = forget_process(process.pid)
        self._tell_all(WorkerLost(worker_id, reason))
        restarts = self._restarts[worker_id]
        pause_s = restarts.note_death(0.0 if ready_s is None else time.monotonic() - ready_s)
        if restarts.is_hopeless and not self.lit_api.ready:
            self._ended_by_itself.append(f"Worker process {worker_id} ended {restarts.num_failures} times soon after its start: {reason}")
            self.end_run()
            return None
        logger.error(
            "Worker process %d has ended (%s) with %d requests open and starts again in %g s.", worker_id, reason, num_lost, pause_s
        )
        return pause_s

    def on_restart(self, worker_id: int) -> None:
        self.lit_api.incarnations[worker_id] += 1

    def on_api_server_death(self, queue_id: int) -> None:
        self._ended_by_itself.append(f"HTTP process {queue_id} has ended by itself.")
        self.end_run()

    def on_ending(self, api_servers: Mapping[int, BaseProcess]) -> None:
        """New requests are refused from now on, and the open ones end, before the API servers stop listening."""
        with suppress(EOFError, OSError):  # the manager is gone, and with it everybody who could be told
            self._tell_all(Drain(self._options.drain_timeout_s))
            deadline_s = time.monotonic() + self._options.drain_timeout_s + STOP_TIMEOUT_S
            while time.monotonic() < deadline_s and self._is_draining(api_servers):
                time.sleep(POLL_S)

    def _is_draining(self, api_servers: Mapping[int, BaseProcess]) -> bool:
        drained = self._drained.copy()
        return any(server.is_alive() and queue_id not in drained for queue_id, server in api_servers.items())

    def _tell_all(self, news: News) -> None:
        for queue_id in range(self.lit_api.num_api_servers):
            self.send_to_api_server(queue_id, news)

    # ---- in an API server

    def on_api_start(self, queue_id: int) -> None:
        api: WorkerAPI = self.lit_api
        others = [one for one in range(api.num_api_servers) if one != queue_id]

        def tell_others(news: Traffic) -> None:
            for one in others:
                self.send_to_api_server(one, news)

        def on_drained() -> None:
            with suppress(EOFError, OSError):  # nobody waits for it
                self._drained[queue_id] = True

        self._client.start(
            queue_id,
            api.controls,
            api.facts.copy(),  # a worker that has ended since is in the news that wait to be read
            tell_others=tell_others if others else None,
            on_drained=on_drained,
        )

    def on_reply(self, payload: Any) -> None:
        self._client.receive(payload)
