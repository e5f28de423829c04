"""The open requests of one front whose engine runs in another process, and where the updates of each go."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from pagedcore.errors import PagedCoreError
from pagedcore.messages import AddRequest, RequestUpdate, failed_update
from pagedcore.outboxes import Outbox, hand_over
from pagedcore.remote.frames import Update, from_wire


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One choice that was sent to the engine, where its updates go, and what came back."""

    request: AddRequest
    """Without its prompt, which may be long."""
    outbox: Outbox
    num_tokens: int = 0
    last: RequestUpdate | None = None
    """The one that ended it."""


class OpenRequests:
    """Owns the open requests. They may be opened on any thread; updates come on one."""

    def __init__(self) -> None:
        self._by_id: dict[str, OpenRequest] = {}
        self._lock = threading.Lock()

    def open(self, request: AddRequest, outbox: Outbox) -> OpenRequest | None:
        """None for an id that is in use, with nothing changed."""
        opened = OpenRequest(replace(request, prompt_token_ids=[]), outbox)
        with self._lock:
            return opened if self._by_id.setdefault(request.request_id, opened) is opened else None

    def is_of(self, request_id: str, outbox: Outbox | None) -> bool:
        """Whether the request is open and this outbox's; None asks for no owner."""
        found = self._by_id.get(request_id)
        return outbox is None or (found is not None and found.outbox == outbox)

    def deliver(self, items: list[Update]) -> list[str]:
        """Hand each outbox its updates in one list; requests that end by them are closed.

        Returns the ids of the open requests of which an outbox failed to take updates: what their callers have has a hole.
        """
        batches: dict[Outbox, list[RequestUpdate]] = {}
        latest, batch = None, []
        find = self._by_id.get
        for item in items:
            opened = find(item.request_id)
            if opened is None:
                continue
            if opened.outbox is not latest:
                latest, batch = opened.outbox, batches.setdefault(opened.outbox, [])
            update = from_wire(item)
            opened.num_tokens += len(update.new_token_ids)
            batch.append(update)
            if update.finish_reason is not None:
                opened.last = update
                self._by_id.pop(update.request_id, None)
        lost = [update.request_id for outbox, updates in batches.items() if not hand_over(outbox, updates) for update in updates]
        return [request_id for request_id in dict.fromkeys(lost) if request_id in self._by_id]

    def fail_all(self, error: PagedCoreError) -> list[OpenRequest]:
        """The last update of every open request. They are returned."""
        with self._lock:
            by_id, self._by_id = self._by_id, {}
        for request_id, opened in by_id.items():
            hand_over(opened.outbox, [failed_update(request_id, error)])
        return list(by_id.values())
