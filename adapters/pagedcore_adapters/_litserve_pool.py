"""Where the requests of one API server are: placed on workers, followed there, given up with a worker that ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pagedcore.errors import EngineClosedError
from pagedcore.messages import AbortRequest, AddRequest, InboxMessage, RequestUpdate, failed_update
from pagedcore.routing.prefix_keys import prefix_keys
from pagedcore.routing.router import Reason, Router, RoutingPolicy
from pagedcore_adapters._litserve_gossip import Gossip, TellOthers
from pagedcore_adapters._litserve_messages import ControlQueue, Sender, Traffic, WorkerAway, WorkerFacts, WorkerLost, WorkerReady
from pagedcore_adapters._litserve_questions import Question
from pagedcore_adapters._litserve_workers import Workers


class WorkerPool:
    """Owns which worker has which request of this API server. Used on its event loop only.

    All choices of one request go to the same worker, and what follows (abort, finish) goes where the request went.
    """

    def __init__(
        self,
        queue_id: int,
        controls: Sequence[ControlQueue],
        facts: Mapping[int, WorkerFacts],
        *,
        policy: RoutingPolicy | None = None,
        tell_others: TellOthers | None = None,
    ) -> None:
        """`facts` are those of the ready workers, one at least; `tell_others` reaches the other API servers, if there are some."""
        plan = next(iter(facts.values())).plan
        self.workers = Workers(len(controls), facts)
        self._queue_id = queue_id
        self._controls = controls
        self._block_size = plan.block_size
        self._router = Router(len(controls), plan.num_blocks, policy)
        self._gossip = None if tell_others is None else Gossip(queue_id, tell_others, lambda: self._router.own_loads)
        self._owners: dict[str, int] = {}

    def send(self, message: InboxMessage) -> None:
        """Raises `EngineClosedError` when no worker can take it."""
        if isinstance(message, AddRequest):
            message = replace(message, routing=self._place(message))
        worker_id = self._owners.get(message.request_id)
        if worker_id is not None:  # otherwise it has just ended
            self.put(worker_id, message)

    def put(self, worker_id: int, message: InboxMessage | Question) -> None:
        """Hand a message to this worker. Raises `EngineClosedError` when the server is shutting down."""
        try:
            self._controls[worker_id].put((Sender(self._queue_id, self.workers.incarnation(worker_id)), message))
        except (EOFError, OSError) as error:
            raise EngineClosedError("The server is shutting down and takes no more requests.") from error

    def note_traffic(self, news: Traffic) -> None:
        """Where another API server has sent its prompts."""
        self._router.note_peer(news.queue_id, news.loads)
        for worker_id, keys in news.prompts:
            self._router.learn(worker_id, keys)

    def note(self, updates: Sequence[RequestUpdate]) -> None:
        """Forget the requests that these updates end."""
        for update in updates:
            if update.finish_reason is not None and (worker_id := self._owners.pop(update.request_id, None)) is not None:
                self._router.release(worker_id)
                if self._gossip is not None:
                    self._gossip.note_loads()

    def note_worker(self, news: WorkerReady | WorkerAway | WorkerLost) -> list[RequestUpdate]:
        """A worker has become ready, has lost its engine, or has ended: the last updates of the requests that it had, unless it sends
        those itself."""
        self.workers.note(news)
        if isinstance(news, WorkerReady):
            return []
        self._router.forget(news.worker_id)
        if isinstance(news, WorkerAway):
            return []
        message = f"Worker process {news.worker_id} has ended ({news.reason}) and took this request with it; send it again."
        return [_failed(request_id, message) for request_id, owner in self._owners.items() if owner == news.worker_id]

    def give_up(self, message: str) -> list[RequestUpdate]:
        """Abort all that is open, in the worker that has it: the last updates of these requests."""
        for request_id in self._owners:
            self.send(AbortRequest(request_id))
        return [_failed(request_id, message) for request_id in self._owners]

    def _place(self, request: AddRequest) -> Reason:
        """Give a request its worker; the load of that grows."""
        worker_id = self._owners.get(request.group_id)
        if worker_id is None:
            return self._place_first(request)
        self._router.take(worker_id)
        self._owners[request.request_id] = worker_id
        return "group"

    def _place_first(self, request: AddRequest) -> Reason:
        keys = prefix_keys(request, self._block_size) if len(self._controls) > 1 else []
        choice = self._router.place(keys, self.workers.usable())
        if self._gossip is not None:
            self._gossip.note_prompt(choice.worker_id, keys)
        self._owners[request.request_id] = choice.worker_id
        return choice.reason


def _failed(request_id: str, message: str) -> RequestUpdate:
    return failed_update(request_id, EngineClosedError(message))
