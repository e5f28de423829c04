"""What an engine's books are told of what its thread takes, does and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagedcore.core.events import Arrived, BlockEvicted, BlocksForgotten, Finished, StepEvents
from pagedcore.core.request_limits import reject_reason
from pagedcore.errors import PagedCoreError, RequestError
from pagedcore.guard import Guard
from pagedcore.last_events import last_events
from pagedcore.messages import AddRequest, RequestUpdate
from pagedcore.observe.recorder import Recorder
from pagedcore.traffic import Door, Traffic, in_a_pause


class EngineBooks:
    """Owns what counts of one engine, and what of it is in no book yet. Belongs to the engine thread, but for `receive` and `close`.

    What cannot be counted is logged, and costs no request anything.
    """

    def __init__(self, recorder: Recorder) -> None:
        """They count nothing until `start`."""
        self._recorder = recorder
        self._door, self._traffic = Door(is_counting=False), Traffic()
        self._guard = Guard("Not all of what happened in the engine could be counted.")
        self._new: list[AddRequest] = []
        """Taken since the last `record`."""
        self._beside: list[Finished] = []
        """Ends of requests that the scheduler never had, not recorded yet."""
        self._unwritten: StepEvents | None = None
        """The last events of a pause in which no open request counts, with the end of its last step."""
        self._is_closed = False

    @property
    def is_counting(self) -> bool:
        return self._door.is_counting

    def receive(self, request: AddRequest) -> AddRequest:
        """The request as the engine thread gets it, marked where it does not count. Under the inbox' lock."""
        if not self._door.admits(request):
            return replace(request, is_traffic=False)
        if request.choice_index == 0:
            self._guard(self._recorder.received, request)
        return request

    def take(self, request: AddRequest) -> None:
        """The scheduler is about to get it, and will tell what becomes of it."""
        self._new.append(request)
        self._traffic.note(request)

    def refuse(self, request: AddRequest, fault: PagedCoreError, now_s: float) -> None:
        """A request with a fault that need not be shown to the scheduler."""
        self._traffic.note(request)
        reason = reject_reason(fault) if isinstance(fault, RequestError) else "invalid"
        num_tokens = len(request.prompt_token_ids)
        self._beside.append(Finished(request, now_s, "rejected", "error", reason, num_abandoned_prompt_tokens=num_tokens))

    def take_lost(self, ends: Sequence[Finished]) -> None:
        """These requests have come here, and ended."""
        if self.is_counting:
            ends = [end for end in ends if end.request.is_traffic is not False]
            for request in {end.request.group_id: end.request for end in ends}.values():
                self._guard(self._recorder.received, request)
            self._beside += ends

    def record(self, events: StepEvents) -> None:
        """Write down what the scheduler tells, and what ended beside it. In a pause the gauges stand still while no open request counts."""
        if self._beside:
            events.events += [event for end in self._beside for event in (Arrived(end.request, end.now_s), end)]
            self._beside.clear()
        if self.is_counting:
            self._traffic.keep(events, is_counting=True)
            self._write(events)
        else:
            self._record_in_a_pause(events)
        self._new.clear()

    def flush(self) -> None:
        """Nothing happens: the windows of the gauges move on."""
        self._catch_up()
        self._guard(self._recorder.flush)

    def complete(self, update: RequestUpdate) -> None:
        """Name the misses of the report of a first or last update."""
        self._guard(self._complete, update)

    def pause(self) -> None:
        """What comes from now on does not count. After a `record`."""
        self._door.is_counting = False

    def start(self) -> None:
        """What comes from now on counts. After a `record`."""
        self._catch_up()
        self._door.is_counting = True

    def close(self, waiting: Sequence[AddRequest], now_s: float) -> None:
        """All that is open, and those that wait to be taken, end by an error; what comes later is not recorded any more.

        May be called twice, from any thread.
        """
        self._guard(self._close, waiting, now_s)

    def _record_in_a_pause(self, events: StepEvents) -> None:
        gone = [event for event in events.events if isinstance(event, BlockEvicted | BlocksForgotten)]
        if gone:
            self._guard(self._recorder.remember, gone)
        self._traffic.keep(events, is_counting=False)
        if events.submitted_s is None and self._unwritten is not None:
            events.submitted_s = self._unwritten.submitted_s  # its time is still that of the step
        self._unwritten = events
        if events.events or self._recorder.open_requests():
            self._catch_up()
        elif not self._is_closed:
            self._guard(self._recorder.maybe_flush, events.now_s)  # what was counted before

    def _catch_up(self) -> None:
        """Write what is left of a pause."""
        if self._unwritten is not None:
            events, self._unwritten = in_a_pause(self._unwritten), None
            self._write(events)

    def _write(self, events: StepEvents) -> None:
        if not self._is_closed:
            self._guard(self._recorder.record, events)
            self._guard(self._recorder.maybe_flush, events.now_s)

    def _complete(self, update: RequestUpdate) -> None:
        if update.cache is not None and not self._traffic.is_other(update.request_id):
            update.cache = self._recorder.complete(update.cache, update.request_id)

    def _close(self, waiting: Sequence[AddRequest], now_s: float) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        events = last_events(self._recorder, [*self._new, *waiting], self._beside, now_s)
        if events is not None:
            self._recorder.record(events)
