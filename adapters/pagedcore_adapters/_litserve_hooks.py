"""All that is used of LitServe beyond its documented surface, in this one file; each line of the list has a test.

- `LitServer._init_manager(num_api_servers)` makes the manager: our queues come from the same one.
- `LitServer._inference_workers_config_for_api(api_path)` has one entry a worker.
- `LitServer._start_worker_monitoring(manager, uvicorn_workers)` runs once the API servers are up.
- `LitServer.inference_workers` are the worker processes, in the order of their ids.
- `LitServer._transport.send(item, consumer_id)` reaches an API server, as `transport.send` does in a worker.
- `LitServer.response_buffer[uid]` is a `ResponseBufferItem` whose `response_queue.append` gets `[payload, status]`.
- `LitServer.lifespan(app)` runs in each API server; `app.response_queue_id` is its consumer id.
- `LitLoop.__call__` is the body of a worker, after `LitAPI.setup`; `LITSERVE_WORKER_ID` is in its environment.
- `litserve.connector.check_cuda_with_nvidia_smi` counts GPUs without loading torch.
"""

from __future__ import annotations

import asyncio
import multiprocessing.connection
import os
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from multiprocessing.managers import SyncManager
from typing import Any

from fastapi import FastAPI
from litserve import LitServer
from litserve.connector import check_cuda_with_nvidia_smi
from litserve.utils import LitAPIStatus, LoopResponseType, ResponseBufferItem

_UID = "pagedcore"
"""The one response buffer entry of an API server: all its requests share it."""


class HookedServer(LitServer):
    """A LitServer that calls the four `on_...` methods; a subclass fills them in and needs nothing private."""

    @abstractmethod
    def on_manager(self, manager: SyncManager, num_workers: int, num_api_servers: int) -> None:
        """In the main process, before any other starts: make what they will share."""

    @abstractmethod
    def on_worker_death(self, worker_id: int) -> None:
        """In the main process, as soon as a worker process has ended."""

    @abstractmethod
    def on_api_start(self, queue_id: int) -> None:
        """In an API server process, before its first request."""

    @abstractmethod
    def on_reply(self, payload: Any) -> None:
        """In an API server process, on its event loop: what a worker, or `send_to_api_server`, has sent."""

    def send_to_api_server(self, queue_id: int, payload: Any) -> None:
        self._transport.send(envelope(payload, worker_id=0), queue_id)

    def _init_manager(self, num_api_servers: int) -> SyncManager:
        manager: SyncManager = super()._init_manager(num_api_servers)
        self.on_manager(manager, len(self._inference_workers_config_for_api(self.lit_api.api_path)), num_api_servers)
        return manager

    def _start_worker_monitoring(self, manager: SyncManager, uvicorn_workers: dict[int, Any]) -> None:
        threading.Thread(target=self._watch_workers, name="pagedcore-watch", daemon=True).start()
        super()._start_worker_monitoring(manager, uvicorn_workers)

    def _watch_workers(self) -> None:
        sentinels = {process.sentinel: worker_id for worker_id, process in enumerate(self.inference_workers)}
        with suppress(EOFError, OSError):  # the manager is gone, and with it everybody who could be told
            while sentinels:
                for ended in multiprocessing.connection.wait(list(sentinels)):
                    self.on_worker_death(sentinels.pop(ended))

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.on_api_start(app.response_queue_id)  # type: ignore[attr-defined]
        self.response_buffer[_UID] = ResponseBufferItem(event=asyncio.Event(), response_queue=_ReplyQueue(self.on_reply))
        async with super().lifespan(app):
            yield


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
