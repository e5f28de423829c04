"""All that is used of LitServe beyond its documented surface, in this one file; each line of the list has a test.

- `LitServer._init_manager(num_api_servers)` makes the manager: our queues come from the same one; `_process` is its process.
- `LitServer._inference_workers_config_for_api(api_path)` has one entry a worker.
- `LitServer.launch_inference_worker(lit_api)` starts the worker processes, `launch_single_inference_worker(lit_api, worker_id)` one
  of them, `_start_server(...)` the API servers.
- `LitServer.verify_worker_status()` waits for the first `WorkerSetupStatus.READY` in `workers_setup_status`.
- `LitServer._start_worker_monitoring(manager, uvicorn_workers)` runs once the API servers are up; its own shuts all down with a worker.
- `LitServer._shutdown_event` ends `run`, whose last act is `_perform_graceful_shutdown(manager, uvicorn_workers, shutdown_reason)`.
- `LitServer.inference_workers` are the worker processes, in the order of their ids.
- `LitServer._transport.send(item, consumer_id)` reaches an API server, as `transport.send` does in a worker.
- `LitServer.response_buffer[uid]` is a `ResponseBufferItem` whose `response_queue.append` gets `[payload, status]`.
- `LitServer.lifespan(app)` runs in each API server; `app.response_queue_id` is its consumer id.
- `LitLoop.__call__` is the body of a worker, after `LitAPI.setup`; `LITSERVE_WORKER_ID` is in its environment.
- `litserve.connector.check_cuda_with_nvidia_smi` counts GPUs without loading torch.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from multiprocessing.managers import SyncManager
from multiprocessing.process import BaseProcess
from typing import Any

from fastapi import FastAPI
from litserve import LitServer
from litserve.connector import check_cuda_with_nvidia_smi
from litserve.utils import LitAPIStatus, LoopResponseType, ResponseBufferItem, WorkerSetupStatus

from pagedcore_adapters._litserve_processes import blocked_signals, end_with_parent
from pagedcore_adapters._litserve_supervisor import Supervisor

_UID = "pagedcore"
"""The one response buffer entry of an API server: all its requests share it."""
START_POLL_S = 0.05


class HookedServer(LitServer):
    """A LitServer that calls the `on_...` methods; a subclass fills them in and needs nothing private.

    Ctrl-C in a terminal, or a supervisor's signal to all processes, is this process' affair: it stops the others in their order.
    """

    _supervisor: Supervisor | None = None

    @abstractmethod
    def on_manager(self, manager: SyncManager, num_workers: int, num_api_servers: int) -> None:
        """In the main process, before any other starts: make what they will share."""

    @abstractmethod
    def on_starting(self, dead_workers: dict[int, int | None]) -> None:
        """In the main process, often, until a worker is ready; raises to give up. Gets id -> exit code of workers that ended."""

    @abstractmethod
    def on_serving(self) -> None:
        """In the main process, when a worker is ready and the API servers have been started."""

    @abstractmethod
    def on_worker_death(self, worker_id: int, process: BaseProcess) -> float | None:
        """In the main process, as soon as a worker process has ended: seconds until it is started again, None for never."""

    @abstractmethod
    def on_restart(self, worker_id: int) -> None:
        """In the main process, before a worker is started again."""

    @abstractmethod
    def on_api_server_death(self, queue_id: int) -> None:
        """In the main process, as soon as an API server process has ended."""

    @abstractmethod
    def on_ending(self, api_servers: Mapping[int, BaseProcess]) -> None:
        """In the main process, on a thread, before the others are ended: let open answers end."""

    @abstractmethod
    def on_api_start(self, queue_id: int) -> None:
        """In an API server process, before its first request."""

    @abstractmethod
    def on_reply(self, payload: Any) -> None:
        """In an API server process, on its event loop: what a worker, or `send_to_api_server`, has sent."""

    def send_to_api_server(self, queue_id: int, payload: Any) -> None:
        self._transport.send(envelope(payload, worker_id=0), queue_id)

    def _init_manager(self, num_api_servers: int) -> SyncManager:
        with blocked_signals(signal.SIGINT, signal.SIGTERM):
            manager: SyncManager = super()._init_manager(num_api_servers)
        self._manager_pid = manager._process.pid  # type: ignore[attr-defined]  # noqa: SLF001
        self.on_manager(manager, len(self._inference_workers_config_for_api(self.lit_api.api_path)), num_api_servers)
        return manager

    def launch_inference_worker(self, lit_api: Any) -> list[Any]:
        with blocked_signals(signal.SIGINT):
            processes: list[Any] = super().launch_inference_worker(lit_api)
        return processes

    def _start_server(self, *args: Any, **kwargs: Any) -> dict[int, Any]:
        with blocked_signals(signal.SIGINT):
            servers: dict[int, Any] = super()._start_server(*args, **kwargs)
        self.on_serving()
        return servers

    def verify_worker_status(self) -> None:
        """Until a worker is ready. LitServe's own waits for ever when one is killed while it loads."""
        while WorkerSetupStatus.READY not in self.workers_setup_status.values():
            dead = {worker_id: process.exitcode for worker_id, process in enumerate(self.inference_workers) if not process.is_alive()}
            self.on_starting(dead)
            time.sleep(START_POLL_S)

    def restart_worker(self, worker_id: int) -> BaseProcess:
        """Start a worker that has ended again."""
        self.on_restart(worker_id)
        with blocked_signals(signal.SIGINT):
            process: BaseProcess = self.launch_single_inference_worker(self.lit_api, worker_id)
        return process

    def end_run(self) -> None:
        """Let `run` end, from any thread."""
        self._shutdown_event.set()

    def _start_worker_monitoring(self, manager: SyncManager, uvicorn_workers: dict[int, Any]) -> None:
        """LitServe's own ends the server when a worker ends."""
        self._supervisor = Supervisor(self.inference_workers, _processes(uvicorn_workers), self)
        threading.Thread(target=self._supervisor.run, name="pagedcore-supervisor", daemon=True).start()

    def _perform_graceful_shutdown(self, manager: SyncManager, uvicorn_workers: dict[int, Any], shutdown_reason: str = "normal") -> None:
        if self._supervisor is not None:
            self._supervisor.stop()
        # A signal leaves this thread's connection to the manager in the middle of an answer; another thread has its own.
        ending = threading.Thread(target=self.on_ending, args=(_processes(uvicorn_workers),), name="pagedcore-ending", daemon=True)
        ending.start()
        ending.join()
        super()._perform_graceful_shutdown(manager, uvicorn_workers, shutdown_reason)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        if multiprocessing.parent_process() is not None:
            threading.Thread(target=end_with_parent, args=(self._manager_pid,), name="pagedcore-parent", daemon=True).start()
        self.on_api_start(app.response_queue_id)  # type: ignore[attr-defined]
        self.response_buffer[_UID] = ResponseBufferItem(event=asyncio.Event(), response_queue=_ReplyQueue(self.on_reply))
        async with super().lifespan(app):
            yield


def _processes(api_servers: dict[int, Any]) -> dict[int, BaseProcess]:
    """Those that are processes: on Windows API servers are threads."""
    return {queue_id: server for queue_id, server in api_servers.items() if hasattr(server, "sentinel")}


class _ReplyQueue:
    """Stands where LitServe keeps a deque: hands each reply on at once instead of storing it."""

    def __init__(self, on_reply: Callable[[Any], None]) -> None:
        self._on_reply = on_reply

    def append(self, response: list[Any]) -> None:
        payload, _status = response
        self._on_reply(payload)


def envelope(payload: Any, worker_id: int) -> tuple[str, tuple[Any, ...]]:
    """`payload` in the form in which LitServe's transport carries it to `on_reply`."""
    return _UID, (payload, LitAPIStatus.OK, LoopResponseType.STREAMING, worker_id)


def current_worker_id() -> int:
    """Number of this worker process, from 0."""
    return int(os.environ["LITSERVE_WORKER_ID"])


def num_gpus() -> int:
    """Visible CUDA devices, counted without loading torch."""
    count: int = check_cuda_with_nvidia_smi()
    return count
