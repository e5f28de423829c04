"""Which requests count. What comes in a pause of the recording, such as prompts that warm the cache up, is no traffic.

It is decided once, when a request comes. All of it counts then until it ends, or nothing does, whatever pauses begin or end meanwhile.
"""

from __future__ import annotations

from pagedcore.core.events import Arrived, Event, Finished, StepEvents
from pagedcore.messages import AddRequest

MAX_GROUPS = 1024
"""Requests with choices still to come that are remembered; where the others' front is lost they never come."""

ALSO_IN_A_PAUSE = (
    "now_s", "submitted_s", "planned_s", "stop_key", "num_running", "num_waiting", "num_swapped", "waiting_by_reason",
    "num_active_blocks", "num_cached_blocks", "num_free_blocks", "num_live_tokens",
)  # fmt: skip
"""Facts of a step that are true in a pause, too: its time, what the requests in the queue wait for, and the gauges of queue and pool."""


class Door:
    """Decides for each request that comes whether it is traffic, and for its choices the same. Used under one lock."""

    def __init__(self, *, is_counting: bool) -> None:
        self.is_counting = is_counting
        self._groups: dict[str, bool] = {}
        """By group id, where choices are still to come."""

    def admits(self, request: AddRequest) -> bool:
        """Whether it counts. Where somebody before has decided, that stands."""
        if request.is_traffic is not None:
            return request.is_traffic
        first = self._groups.pop(request.group_id, None)
        is_traffic = self.is_counting if first is None or not request.choice_index else first
        if request.choice_index + 1 < request.num_choices:
            self._groups[request.group_id] = is_traffic
            if len(self._groups) > MAX_GROUPS:
                del self._groups[next(iter(self._groups))]
        return is_traffic


class Traffic:
    """Owns which open requests do not count. Belongs to the engine thread."""

    def __init__(self) -> None:
        self._num_others = 0
        self._others: dict[str, AddRequest] = {}
        """By id, between their two events."""
        self._just_ended: set[str] = set()
        """Their ids, until the next events."""

    def note(self, request: AddRequest) -> None:
        """The engine has taken a request. Its events are still to come."""
        self._num_others += request.is_traffic is False

    def keep(self, step: StepEvents, *, is_counting: bool) -> None:
        """Take from these events those that do not count: in a pause all but those of traffic."""
        self._just_ended.clear()
        if step.events and not (is_counting and not self._num_others):
            step.events = [event for event in step.events if self._counts(event, is_counting)]

    def is_other(self, request_id: str) -> bool:
        """Whether a request that does not count has this id: it is open, or has ended in the events that came last."""
        return request_id in self._others or request_id in self._just_ended

    def _counts(self, event: Event, is_counting: bool) -> bool:
        if isinstance(event, Arrived | Finished):
            if event.request.is_traffic is not False:
                return True
            self._follow(event)
            return False
        request_id = getattr(event, "request_id", None)
        return is_counting if request_id is None else request_id not in self._others

    def _follow(self, event: Arrived | Finished) -> None:
        """One whose id is in use arrives and is rejected, and the open request goes on."""
        request = event.request
        if isinstance(event, Arrived):
            self._others.setdefault(request.request_id, request)
        else:
            self._num_others -= 1
            if self._others.get(request.request_id) is request:
                del self._others[request.request_id]
                if event.status != "rejected":  # a rejected one may have asked for the id of one that counts
                    self._just_ended.add(request.request_id)


def in_a_pause(step: StepEvents) -> StepEvents:
    """These events, which count, and no step."""
    return StepEvents(events=step.events, **{name: getattr(step, name) for name in ALSO_IN_A_PAUSE})
