"""Requests from arrival to end: what a caller sent counts once, however many choices it unfolded into."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pagedcore.core.events import Admitted, Arrived, Finished, FirstToken, Preempted
from pagedcore.messages import AddRequest
from pagedcore.observe.labels import RequestLabels
from pagedcore.observe.ledger import Handlers, Key, Ledger
from pagedcore.observe.lookups import LookupBook
from pagedcore.outputs import Status
from pagedcore.traceparent import trace_id_of

_SEVERITY: dict[Status, int] = {"running": 0, "completed": 1, "aborted": 2, "rejected": 3, "error": 4}

MAX_HALF_ENDED_GROUPS = 1024
"""Rejected requests whose other choices may never come: at most this many are remembered."""


@dataclass(slots=True)
class Group:
    """One request as its caller sees it: all choices of one group id."""

    request: AddRequest
    num_ended: int = 0
    status: Status = "running"
    """The worst status of the ended choices."""
    finish_reason: str = ""
    """Of a completed request: "length" when any choice ended by it, else "stop"."""
    is_admitted: bool = False
    has_first_token: bool = False
    is_counted: bool = False
    last: Finished | None = None
    """The end of the choice that ended last."""
    trace_id: str | None = None
    """The caller's trace: latencies of this request may stand as exemplars."""

    def note_end(self, event: Finished) -> None:
        """One choice has ended."""
        self.num_ended += 1
        self.last = event
        self.status = max(self.status, event.status, key=_SEVERITY.__getitem__)
        if self.status != "completed":
            self.finish_reason = ""
        elif self.finish_reason != "length":
            self.finish_reason = event.finish_reason or ""


class RequestBook:
    """Owns the open requests and their groups; writes the request counters and latencies of the ledger.

    Latencies of a group are those of its first choice to get there, and its prompt counts once; output tokens, and the
    time an output token takes, are those of every choice. A group is counted when its last choice ends, or at once when
    one is rejected. Events of a request whose arrival was not recorded are left out.
    """

    def __init__(self, ledger: Ledger, lookups: LookupBook) -> None:
        self._ledger = ledger
        self._lookups = lookups
        self._labels = RequestLabels()
        self._open: dict[str, tuple[AddRequest, Group]] = {}
        self._groups: dict[str, Group] = {}
        self._half_ended: deque[str] = deque()
        self.just_counted: list[Key] = []
        """Of the ended requests that were counted since somebody emptied it."""

    def handlers(self) -> Handlers:
        """What is done with each event that is written down here."""
        beginnings: Handlers = {Arrived: self.arrived, Admitted: self.admitted, FirstToken: self.first_token}
        return {**beginnings, Preempted: self.preempted, Finished: self.finished}

    def received_key(self, request: AddRequest) -> Key:
        """Of the counter of received requests."""
        return ("pagedcore_received_requests_total", *self._labels.of(request))

    def open_requests(self) -> list[AddRequest]:
        """Choices that have arrived and not ended."""
        return [request for request, _ in self._open.values()]

    def close(self) -> None:
        """Count the groups of which a choice has ended and another never came, since the engine was closed meanwhile."""
        for group in self._groups.values():
            if group.last is not None and not group.is_counted:
                self._count_group(group, group.last)

    def arrived(self, event: Arrived) -> None:
        request = event.request
        if request.request_id in self._open:
            return  # its id is in use: it can only be rejected, and the open request goes on
        group = self._groups.setdefault(request.group_id, Group(request))
        self._open[request.request_id] = (request, group)  # before anything of the request's own can go wrong
        group.trace_id = trace_id_of(group.request.traceparent)

    def admitted(self, event: Admitted) -> None:
        entry = self._open.get(event.request_id)
        if entry is None:
            return
        request, group = entry
        tenant = self._labels.tenant(request.tenant)
        if not group.is_admitted:
            group.is_admitted = True
            self._ledger.observe("pagedcore_time_in_queue_seconds", event.now_s - group.request.arrival_s, group.trace_id)
            self._ledger.add("pagedcore_prompt_tokens_total", len(request.prompt_token_ids), tenant)
        if event.lookup is not None:
            self._lookups.looked_up(request, tenant, event.lookup, event.now_s)

    def first_token(self, event: FirstToken) -> None:
        entry = self._open.get(event.request_id)
        if entry is not None and not entry[1].has_first_token:
            group = entry[1]
            group.has_first_token = True
            self._ledger.observe("pagedcore_time_to_first_token_seconds", event.now_s - group.request.arrival_s, group.trace_id)

    def preempted(self, _: Preempted) -> None:
        self._ledger.add("pagedcore_preemptions_total", 1)

    def finished(self, event: Finished) -> bool:
        """One choice ended: its tokens count; the last choice, or a rejected one, ends its group. True when that is counted now."""
        entry = self._open.get(event.request.request_id)
        if entry is None:
            return False
        if entry[0] is not event.request:  # both events of a request hold the same object
            self._count_duplicate(event)
            return False
        del self._open[event.request.request_id]
        group = entry[1]
        group.note_end(event)
        is_last = group.num_ended >= group.request.num_choices
        is_counted = (is_last or event.status == "rejected") and not group.is_counted
        group.is_counted = group.is_counted or is_counted
        self._forget(group, is_last)  # before the counting: what cannot be counted is not open any more, either
        self._lookups.finished(event)
        self._count_output(event)
        if is_counted:
            self._count_group(group, event)
        return is_counted

    def _count_duplicate(self, event: Finished) -> None:
        """A choice whose id was in use was rejected, and so its group, which is not that of the open one."""
        group = Group(event.request) if event.request.choice_index == 0 else self._groups.get(event.request.group_id)
        if group is not None and group.request.arrival_s == event.request.arrival_s and not group.is_counted:
            group.note_end(event)
            self._count_group(group, event)

    def _count_output(self, event: Finished) -> None:
        tenant = self._labels.tenant(event.request.tenant)
        self._ledger.note_end(event)
        self._ledger.add("pagedcore_generation_tokens_total", event.num_output_tokens, tenant)
        self._ledger.add("pagedcore_discarded_tokens_total", event.num_discarded_tokens)
        if event.first_token_s is not None and event.last_token_s is not None and event.num_output_tokens > 1:
            seconds = (event.last_token_s - event.first_token_s) / (event.num_output_tokens - 1)
            self._ledger.observe("pagedcore_time_per_output_token_seconds", seconds)

    def _count_group(self, group: Group, event: Finished) -> None:
        group.is_counted = True
        request = group.request
        key = ("pagedcore_requests_total", group.status, group.finish_reason, *self._labels.of(request))
        self._ledger.add(key[0], 1, *key[1:])
        self.just_counted.append(key)
        if group.status == "rejected":
            self._ledger.add("pagedcore_rejected_requests_total", 1, event.reject_reason or "invalid")
        else:
            self._ledger.observe("pagedcore_request_latency_seconds", event.now_s - request.arrival_s, group.trace_id)

    def _forget(self, group: Group, is_last: bool) -> None:
        """Drop a group that is complete; keep a counted one a while for choices still to come."""
        group_id = group.request.group_id
        if is_last:
            if self._groups.get(group_id) is group:
                del self._groups[group_id]
        elif group.is_counted:
            self._half_ended.append(group_id)
            if len(self._half_ended) > MAX_HALF_ENDED_GROUPS:
                self._groups.pop(self._half_ended.popleft(), None)
