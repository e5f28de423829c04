"""The API server's side of LitServe: an `EngineClient` whose engine runs in worker processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedcore import RequestOutput, SamplingParams
from pagedcore.async_engine import load_text
from pagedcore.client import ModelInfo, RequestContext, TextFront
from pagedcore.errors import EngineClosedError
from pagedcore.front import Front
from pagedcore.messages import AddRequest, InboxMessage, RequestUpdate
from pagedcore_adapters._litserve_questions import Answer, Asker, Question
from pagedcore_adapters._litserve_worker import ControlQueue, Reply, WorkerFacts
from pagedcore_adapters._prometheus_dir import multiprocess_metrics


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The main process tells the API servers that a worker process has ended."""

    worker_id: int


class WorkerPool:
    """Owns which worker has which request of this API server. Used on its event loop only.

    A new request goes to the worker with the fewest open requests of ours, the lowest id first; all choices of one
    request go to the same worker, and what follows (abort, finish) goes where the request went.
    """

    def __init__(self, queue_id: int, controls: Sequence[ControlQueue], facts: Mapping[int, WorkerFacts]) -> None:
        self._queue_id = queue_id
        self._controls = controls
        self._facts = facts
        self._warm: set[int] = set()
        self._lost: set[int] = set()
        self._owners: dict[str, int] = {}
        self._loads: Counter[int] = Counter()

    @property
    def has_lost_a_worker(self) -> bool:
        return bool(self._lost)

    def send(self, message: InboxMessage) -> None:
        """Raises `EngineClosedError` when no worker can take it."""
        worker_id = self._owners.get(message.request_id)
        if isinstance(message, AddRequest):
            worker_id = self._owners.get(message.group_id, self._least_loaded())
            self._owners[message.request_id] = worker_id
            self._loads[worker_id] += 1
        if worker_id is None:
            return  # it has just ended
        self.put(worker_id, message)

    def put(self, worker_id: int, message: InboxMessage | Question) -> None:
        """Hand a message to this worker. Raises `EngineClosedError` when the server is shutting down."""
        try:
            self._controls[worker_id].put((self._queue_id, message))
        except (EOFError, OSError) as error:
            raise EngineClosedError("The server is shutting down and takes no more requests.") from error

    def note(self, updates: Sequence[RequestUpdate]) -> None:
        """Forget the requests that these updates end."""
        for update in updates:
            if update.finish_reason is not None and (worker_id := self._owners.pop(update.request_id, None)) is not None:
                self._loads[worker_id] -= 1

    def lose(self, worker_id: int) -> list[RequestUpdate]:
        """A worker is gone: the last updates of the requests that it had."""
        self._lost.add(worker_id)
        error = EngineClosedError(f"Worker process {worker_id} has ended and took this request with it; send it again.")
        return [
            RequestUpdate(request_id=request_id, new_token_ids=[], finish_reason="error", status="error", error=error)
            for request_id, owner in self._owners.items()
            if owner == worker_id
        ]

    def usable(self) -> list[int]:
        """The workers that are warm and alive, in order. Raises `EngineClosedError` when none is."""
        if len(self._warm) < len(self._controls):
            self._warm = set(self._facts.keys())
        usable = sorted(self._warm - self._lost)
        if not usable:
            raise EngineClosedError("No worker process is left to take this request; the server is shutting down.")
        return usable

    def _least_loaded(self) -> int:
        return min(self.usable(), key=lambda worker_id: self._loads[worker_id])


class WorkerClient:
    """An engine as the router sees it. Made before the API servers are forked, started in each of them."""

    def __init__(self) -> None:
        self._front: Front | None = None
        self._pool: WorkerPool | None = None
        self._asker: Asker | None = None

    def start(self, queue_id: int, controls: Sequence[ControlQueue], facts: Mapping[int, WorkerFacts]) -> None:
        """Load the tokenizer of the workers' model. At least one worker must be warm."""
        worker = next(iter(facts.values()))
        self._pool = WorkerPool(queue_id, controls, facts)
        self._asker = Asker(self._pool.put)
        self._front = Front(worker.info, load_text(worker.plan), self._pool.send)

    def receive(self, reply: Reply | WorkerLost) -> None:
        """Hand one reply of a worker, or the news of its end, to the requests and questions that wait for it."""
        pool, front = self._started()
        if isinstance(reply, Answer):
            self._questions().receive(reply)
            return
        if isinstance(reply, WorkerLost):
            updates = pool.lose(reply.worker_id)
            self._questions().lose(reply.worker_id)
        else:
            updates = reply
        pool.note(updates)
        front.deliver(updates)

    @property
    def info(self) -> ModelInfo:
        return self._started()[1].info

    @property
    def text(self) -> TextFront | None:
        return self._started()[1].text

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        context: RequestContext | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """Stream one request; see `EngineClient.generate`."""
        return self._started()[1].generate(prompt, params, request_id, context=context, add_special_tokens=add_special_tokens)

    async def abort(self, request_id: str) -> None:
        await self._started()[1].abort(request_id)

    async def is_ready(self) -> bool:
        return self._pool is not None and not self._pool.has_lost_a_worker

    async def is_alive(self) -> bool:
        return await self.is_ready()

    async def metrics_text(self, accept: str = "") -> tuple[bytes, str]:
        """The series of all workers: each writes its own to files that this process reads."""
        return await asyncio.to_thread(multiprocess_metrics)

    async def inspect(self, question: str, **arguments: Any) -> list[dict[str, Any]]:
        """One answer a living worker; see `EngineClient.inspect`."""
        workers = self._started()[0].usable()
        return await self._questions().ask(workers, question, arguments)

    def _questions(self) -> Asker:
        assert self._asker is not None, "the asker is made with the pool"
        return self._asker

    def _started(self) -> tuple[WorkerPool, Front]:
        if self._pool is None or self._front is None:
            raise EngineClosedError("The API server has not started yet.")
        return self._pool, self._front
