"""The open requests of one front whose engine runs in another process, and where the updates of each go."""

from __future__ import annotations

import threading

from pagedcore.errors import PagedCoreError
from pagedcore.messages import RequestUpdate, failed_update
from pagedcore.outboxes import Outbox
from pagedcore.remote.frames import Update, from_wire


class OpenRequests:
    """Owns the outbox of each open request. Requests may be opened on any thread; updates come on one."""

    def __init__(self) -> None:
        self._outboxes: dict[str, Outbox] = {}
        self._lock = threading.Lock()

    def open(self, request_id: str, outbox: Outbox) -> bool:
        """False for an id that is in use, with nothing changed."""
        with self._lock:
            if request_id in self._outboxes:
                return False
            self._outboxes[request_id] = outbox
            return True

    def is_of(self, request_id: str, outbox: Outbox | None) -> bool:
        """Whether the request is open and this outbox's; None asks for no owner."""
        return outbox is None or self._outboxes.get(request_id) == outbox

    def deliver(self, items: list[Update]) -> None:
        """Hand each outbox its updates in one list; requests that end by them are closed."""
        batches: dict[Outbox, list[RequestUpdate]] = {}
        latest, batch = None, []
        find = self._outboxes.get
        for item in items:
            outbox = find(item.request_id)
            if outbox is None:
                continue
            if outbox is not latest:
                latest, batch = outbox, batches.setdefault(outbox, [])
            update = from_wire(item)
            batch.append(update)
            if update.finish_reason is not None:
                self._outboxes.pop(update.request_id, None)
        for outbox, updates in batches.items():
            outbox(updates)

    def fail_all(self, error: PagedCoreError) -> None:
        """The last update of every open request."""
        with self._lock:
            outboxes, self._outboxes = self._outboxes, {}
        for request_id, outbox in outboxes.items():
            outbox([failed_update(request_id, error)])
