"""The few prompt tokens of each request that an explanation may show."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from pagedcore.core.events import Admitted, Arrived, Finished, StepEvents
from pagedcore.core.lookup import LookupReport
from pagedcore.messages import AddRequest

NUM_FINISHED_KEPT = 1024
"""Ended requests whose excerpt can still be asked for; as many as have a cache report."""
NUM_TOKENS_AROUND = 16
"""Tokens kept on each side of the place where a prompt left the cached ones."""
NUM_HEAD_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Whose prompt it was, how it began, and what stood around the first token that no cached prompt shared."""

    tenant: str | None
    head: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]


class Excerpts:
    """Owns the excerpts of running requests and of the last `NUM_FINISHED_KEPT` ended ones.

    `record` belongs to the engine thread, `find` to any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, AddRequest] = {}
        self._running: dict[str, Excerpt] = {}
        self._finished: OrderedDict[str, Excerpt] = OrderedDict()

    def record(self, step: StepEvents) -> None:
        """Keep what the events of a batch bring; forget the oldest."""
        if not step.events:
            return
        with self._lock:
            for event in step.events:
                if isinstance(event, Arrived):
                    self._arrive(event.request)
                elif isinstance(event, Admitted) and event.lookup is not None:
                    self._admit(event.request_id, event.lookup)
                elif isinstance(event, Finished) and self._open.get(event.request.request_id) is event.request:
                    self._end(event.request.request_id)

    def find(self, request_id: str) -> Excerpt | None:
        """The excerpt of a request that was looked up and is still remembered."""
        with self._lock:
            return self._running.get(request_id) or self._finished.get(request_id)

    def _arrive(self, request: AddRequest) -> None:
        """An ended request of this id is found no more, unless the new one is refused since its id is in use."""
        if self._open.setdefault(request.request_id, request) is request:
            self._finished.pop(request.request_id, None)

    def _admit(self, request_id: str, lookup: LookupReport) -> None:
        request = self._open.get(request_id)
        if request is None:
            return  # it arrived while nothing was recorded
        tokens = request.prompt_token_ids
        left_at = lookup.num_hit_tokens + (lookup.sibling_common_tokens or 0)
        before, after = tokens[max(left_at - NUM_TOKENS_AROUND, 0) : left_at], tokens[left_at : left_at + NUM_TOKENS_AROUND]
        self._running[request_id] = Excerpt(request.tenant, tuple(tokens[:NUM_HEAD_TOKENS]), tuple(before), tuple(after))

    def _end(self, request_id: str) -> None:
        del self._open[request_id]
        excerpt = self._running.pop(request_id, None)
        if excerpt is None:
            return
        self._finished[request_id] = excerpt
        self._finished.move_to_end(request_id)
        if len(self._finished) > NUM_FINISHED_KEPT:
            self._finished.popitem(last=False)
