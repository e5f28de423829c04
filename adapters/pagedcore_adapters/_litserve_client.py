"""The API server's side of LitServe: an `EngineClient` whose engine runs in worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from pagedcore import RequestOutput, SamplingParams
from pagedcore.async_engine import load_text
from pagedcore.client import EngineClient, ModelInfo, RequestContext, TextFront
from pagedcore.errors import EngineClosedError
from pagedcore.front import Front
from pagedcore.messages import RequestUpdate
from pagedcore.routing.router import RoutingPolicy
from pagedcore_adapters._litserve_gossip import TellOthers
from pagedcore_adapters._litserve_messages import (
    ControlQueue,
    Drain,
    News,
    Reply,
    Traffic,
    WorkerAway,
    WorkerFacts,
    WorkerLost,
    WorkerReady,
)
from pagedcore_adapters._litserve_pool import WorkerPool
from pagedcore_adapters._litserve_questions import Answer, Asker
from pagedcore_adapters._prometheus_dir import multiprocess_metrics


class WorkerClient:
    """An engine as the router sees it. Made before the API servers are forked, started in each of them."""

    def __init__(self, policy: RoutingPolicy | None = None) -> None:
        self._policy = policy
        self._front: Front | None = None
        self._pool: WorkerPool | None = None
        self._asker: Asker | None = None
        self._draining: asyncio.Task[None] | None = None

    def start(
        self,
        queue_id: int,
        controls: Sequence[ControlQueue],
        facts: Mapping[int, WorkerFacts],
        *,
        tell_others: TellOthers | None = None,
        on_drained: Callable[[], None] = lambda: None,
    ) -> None:
        """Load the tokenizer of the workers' model. At least one worker must be warm.

        `tell_others` reaches the other API servers, if there are some; `on_drained` is called once no request is open after a `Drain`.
        """
        worker = next(iter(facts.values()))
        self._on_drained = on_drained
        self._pool = WorkerPool(queue_id, controls, facts, policy=self._policy, tell_others=tell_others)
        self._asker = Asker(self._pool.put)
        self._front = Front(worker.info, load_text(worker.plan), self._pool.send)

    def engine_client(self) -> EngineClient:
        """What the routes ask."""
        return self

    def receive(self, message: Reply | News) -> None:
        """Hand a reply of a worker, or news, to the requests and questions that wait for it. Called on the event loop."""
        pool, front = self._started()
        if isinstance(message, Answer):
            self._questions().receive(message)
        elif isinstance(message, Traffic):
            pool.note_traffic(message)
        elif isinstance(message, Drain):
            front.begin_drain()
            self._draining = asyncio.get_running_loop().create_task(self._drain(front, message.timeout_s))
        else:
            self._deliver(self._note_worker(message) if isinstance(message, WorkerReady | WorkerAway | WorkerLost) else message)

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
        """Every worker is warm, and the server not draining. Raises `EngineClosedError`, which says which worker is not."""
        if self._pool is None or self._front is None or self._front.is_draining:
            return False
        self._pool.workers.check_all_ready()
        return True

    async def is_alive(self) -> bool:
        """A worker lives: whoever restarts a dead server has nothing to do. Raises `EngineClosedError`, which says what each does, when
        none does."""
        if self._pool is None:
            return False
        self._pool.workers.check_one_lives()
        return True

    async def metrics_text(self, accept: str = "") -> tuple[bytes, str]:
        """The series of all workers: each writes its own to files that this process reads."""
        return await asyncio.to_thread(multiprocess_metrics)

    async def inspect(self, question: str, **arguments: Any) -> list[dict[str, Any]]:
        """One answer a living worker; see `EngineClient.inspect`."""
        return await self._questions().ask(self._started()[0].workers.usable(), question, arguments)

    def _note_worker(self, news: WorkerReady | WorkerAway | WorkerLost) -> list[RequestUpdate]:
        if isinstance(news, WorkerLost):
            self._questions().lose(news.worker_id)
        return self._started()[0].note_worker(news)

    def _deliver(self, updates: list[RequestUpdate]) -> None:
        pool, front = self._started()
        pool.note(updates)
        front.deliver(updates)

    async def _drain(self, front: Front, timeout_s: float) -> None:
        """Let the open requests end, and end them where they do not within this time."""
        if not await asyncio.to_thread(front.drain, timeout_s):
            message = f"The server shuts down and this request did not end within {timeout_s:g} s; send it again."
            self._deliver(self._started()[0].give_up(message))
        self._on_drained()

    def _questions(self) -> Asker:
        if self._asker is None:
            raise EngineClosedError("The API server has not started yet.")
        return self._asker

    def _started(self) -> tuple[WorkerPool, Front]:
        if self._pool is None or self._front is None:
            raise EngineClosedError("The API server has not started yet.")
        return self._pool, self._front
