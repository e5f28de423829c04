"""Which request's updates go where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

from pagedcore.errors import PagedCoreError
from pagedcore.guard import Guard
from pagedcore.messages import RequestUpdate, failed_update

Outbox = Callable[[list[RequestUpdate]], None]
"""Takes one step's updates of its requests. Called on the engine thread: hand them on and return."""

_guard = Guard("Updates of requests were not taken by whoever waits for them.")


class Outboxes:
    """Owns the outbox of each open request, and refusals that wait until they were counted. Belongs to one thread."""

    def __init__(self) -> None:
        self._by_id: dict[str, Outbox] = {}
        self._refused: list[tuple[Outbox, RequestUpdate]] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[str]:
        """Ids of the open requests."""
        return iter(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def owns(self, outbox: Outbox, request_id: str) -> bool:
        """Whether the request is open and this outbox's."""
        return self._by_id.get(request_id) == outbox

    def open(self, request_id: str, outbox: Outbox) -> None:
        self._by_id[request_id] = outbox

    def close(self, request_id: str) -> None:
        """No update of the request is delivered any more."""
        self._by_id.pop(request_id, None)

    def refuse(self, request_id: str, outbox: Outbox, error: PagedCoreError) -> None:
        """The request's only update is told by the next `tell_refused`."""
        self._refused.append((outbox, failed_update(request_id, error, "rejected")))

    def deliver(self, updates: Iterable[RequestUpdate], complete: Callable[[RequestUpdate], object]) -> list[tuple[str, Outbox]]:
        """Hand each outbox its updates in one list. First and last ones, which carry a cache report, pass through `complete`; after its
        last one a request is closed.

        Returns the open requests of which an outbox failed to take updates: what their callers have has a hole.
        """
        find = self._by_id.get
        batches: dict[Outbox, list[RequestUpdate]] = {}
        latest, batch = None, []
        for update in updates:
            outbox = find(update.request_id)
            if outbox is None:
                continue
            if outbox is not latest:
                latest, batch = outbox, batches.setdefault(outbox, [])
            batch.append(update)
            if update.cache is not None:
                complete(update)
                if update.finish_reason is not None:
                    self.close(update.request_id)
        lost = [(update.request_id, outbox) for outbox, own in batches.items() if not hand_over(outbox, own) for update in own]
        return [(request_id, outbox) for request_id, outbox in dict.fromkeys(lost) if self.owns(outbox, request_id)]

    def tell_refused(self) -> None:
        while self._refused:
            outbox, update = self._refused.pop(0)
            hand_over(outbox, [update])

    def end_all(self, error: PagedCoreError) -> None:
        """The last update of each request that is still open, whatever a telling raises."""
        with ExitStack() as last:
            for request_id in reversed(list(self._by_id)):
                outbox = self._by_id.pop(request_id, None)
                if outbox is not None:
                    last.callback(hand_over, outbox, [failed_update(request_id, error)])
            for _ in self._refused:
                last.callback(self.tell_refused)  # again where one before raised


def hand_over(outbox: Outbox, updates: list[RequestUpdate]) -> bool:
    """False, and an error in the log, where the outbox raises: others wait for theirs. See `Guard` for what the main thread lets out."""
    return _guard(outbox, updates)
