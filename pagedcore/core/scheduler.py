"""The scheduler: what runs next, in which blocks; and what became of it."""

from __future__ import annotations

from pagedcore.core.admission import Admission
from pagedcore.core.block_pool import BlockPool
from pagedcore.core.commit import commit_step, fail_step
from pagedcore.core.ending import ABORTED, Outcome, end_request, failed
from pagedcore.core.events import Arrived, Finished, StepEvents, WaitingReason
from pagedcore.core.limits import SchedulerLimits
from pagedcore.core.placement import place_running
from pagedcore.core.request import Request, RequestState
from pagedcore.core.request_limits import check_priority, check_queue, check_size, check_token_ids, reject_reason
from pagedcore.core.state import InFlightStep, SchedulerState
from pagedcore.core.step import StepPlan, StepResult
from pagedcore.core.step_builder import StepBuilder
from pagedcore.errors import PagedCoreError, RequestError, id_in_use
from pagedcore.messages import AddRequest, RequestUpdate
from pagedcore.tenancy.limits import UNNAMED


class Scheduler:
    """Owns every request from `add` to its end: waiting, running, their progress, rows and blocks.

    One step is `schedule` -> (device) -> `commit`, in order; `num_in_flight_steps` of them may be between the two. A request
    has known and computed tokens, and `schedule` closes the gap within a token budget: running requests first, then
    admissions. With at least one runnable request each `schedule` advances or preempts, or waits for a step in flight.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._state = SchedulerState(limits)
        self._admission = Admission(self._state)
        self._num_arrivals = 0
        self._next_step_id = 0
        self._batch_deadline_s: float | None = None
        self._previous_plan: StepPlan | None = None

    @property
    def pool(self) -> BlockPool:
        """The KV pool, for those who only look."""
        return self._state.kv.pool

    @property
    def has_work(self) -> bool:
        """There is something to schedule or to commit."""
        return bool(self._state.requests or self._state.in_flight)

    @property
    def can_schedule(self) -> bool:
        """Another step may be planned, and there are requests."""
        return bool(self._state.requests) and len(self._state.in_flight) < self.limits.num_in_flight_steps

    def next_wake_s(self, now_s: float) -> float | None:
        """Until when `schedule` holds waiting requests back for a fuller batch; None when it does not."""
        return self._batch_deadline_s if self._holds_back(now_s) else None

    def check(self, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Raise what adding a request of this size would raise. Reads only the limits, so any thread may call it."""
        check_size(self.limits, num_prompt_tokens, max_tokens)

    def add(self, request: AddRequest, now_s: float) -> None:
        """Queue a request. Raises `RequestError`, with nothing queued, when it cannot be served."""
        self._state.record.add(Arrived(request, now_s))
        try:
            max_total_tokens = self._admissible(request)
        except RequestError as error:
            self._record_rejection(request, error, now_s)
            raise
        if self.limits.max_batch_wait_s and not self._state.requests and not self._state.in_flight:
            self._batch_deadline_s = now_s + self.limits.max_batch_wait_s
        order_key = (request.priority if self.limits.scheduling_policy == "priority" else 0, self._num_arrivals)
        queued = Request(add_request=request, max_total_tokens=max_total_tokens, order_key=order_key, queued_s=now_s)
        self._num_arrivals += 1
        self._state.requests[request.request_id] = queued
        self._state.waiting.add(queued)

    def abort(self, request_id: str, now_s: float) -> None:
        """End a request as aborted, in whatever state it is; unknown ids are ignored."""
        self._end(request_id, ABORTED, now_s)

    def finish(self, request_id: str, num_tokens: int, stop_reason: str | None, now_s: float) -> None:
        """End a request whose text is complete after `num_tokens` output tokens; unknown ids are ignored."""
        outcome = Outcome(status="completed", finish_reason="stop", stop_reason=stop_reason, num_kept_tokens=num_tokens)
        self._end(request_id, outcome, now_s)

    def end_all(self, now_s: float, error: PagedCoreError | None = None) -> None:
        """End every request: as aborted, or as failed with `error`."""
        outcome = ABORTED if error is None else failed(error)
        for request in list(self._state.requests.values()):
            end_request(self._state, request, outcome, now_s)

    def schedule(self, now_s: float) -> StepPlan | None:
        """Plan the next step on future state; None when nothing can run now."""
        if not self.can_schedule:
            return None
        if self._batch_deadline_s is not None:
            is_over = not self._holds_back(now_s)
            self._admission.hold_back(now_s, is_over=is_over)
            if not is_over:
                return None
            self._batch_deadline_s = None
        step = StepBuilder(self._next_step_id)
        place_running(self._state, step, now_s)
        self._admission.admit(step, now_s)
        if not step.requests:
            return None
        return self._start(step, now_s)

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """Make the oldest step in flight true."""
        commit_step(self._state, self._pop_step(plan), result, now_s)

    def fail(self, plan: StepPlan, error: PagedCoreError, now_s: float) -> None:
        """The oldest step in flight failed: its requests end with `error`, the others go on."""
        fail_step(self._state, self._pop_step(plan), error, now_s)

    def take_updates(self) -> list[RequestUpdate]:
        """What changed for requests since the last call."""
        return self._state.record.take_updates()

    def take_events(self) -> StepEvents:
        """What happened since the last call, with the state of queues and pool as it is now."""
        state, pool = self._state, self._state.kv.pool
        step = state.record.take_step()
        step.num_running, step.num_waiting, step.num_swapped = len(state.running), len(state.waiting), state.kv.host.num_swapped_requests
        step.waiting_by_reason, step.stop_key = self._admission.waiting_by_reason(), self._admission.stop_key
        step.num_active_blocks = pool.num_active_blocks
        step.num_cached_blocks = pool.num_cached_blocks
        step.num_free_blocks = pool.num_free_blocks
        step.num_live_tokens = state.kv.num_filled_slots(state.num_live_tokens)
        return step

    def reset_prefix_cache(self, now_s: float) -> bool:
        """Forget every cached block without owner, and host memory. False when requests hold hashed blocks, which then stay shared."""
        self._state.kv.drop_cached(now_s)
        return not self._state.kv.pool.has_hashed_blocks()

    def waiting_reason(self, request_id: str) -> WaitingReason | None:
        """Why a request waits; None when it does not."""
        request = self._state.requests.get(request_id)
        return self._admission.waiting_reason(request) if request is not None and request.state is RequestState.WAITING else None

    def check_invariants(self) -> None:
        """Raises AssertionError when an owner's state contradicts itself or another's. Changes nothing."""
        self._state.check_invariants()

    def _holds_back(self, now_s: float) -> bool:
        """Whether an idle engine still waits for a fuller batch."""
        state, deadline_s = self._state, self._batch_deadline_s
        is_window_open = deadline_s is not None and now_s < deadline_s
        return is_window_open and 0 < len(state.waiting) < self.limits.max_num_seqs and not len(state.running)

    def _admissible(self, request: AddRequest) -> int:
        """The most tokens the request may have. Raises `RequestError`."""
        if request.request_id in self._state.requests:
            raise id_in_use(request.request_id)
        max_total_tokens = check_size(self.limits, len(request.prompt_token_ids), request.params.max_tokens)
        check_token_ids(request.prompt_token_ids)
        check_priority(self.limits, request.priority)
        waiting, num_free_rows = self._state.waiting, self.limits.max_num_seqs - len(self._state.running)
        check_queue(self.limits, waiting.num_held_up(num_free_rows))
        self.limits.tenants.check_waiting(request.tenant or UNNAMED, waiting.num_held_up_of(request.tenant or UNNAMED, num_free_rows))
        return max_total_tokens

    def _record_rejection(self, request: AddRequest, error: RequestError, now_s: float) -> None:
        num_tokens = len(request.prompt_token_ids)
        event = Finished(request, now_s, "rejected", "error", reject_reason(error), num_abandoned_prompt_tokens=num_tokens)
        self._state.record.add(event)

    def _end(self, request_id: str, outcome: Outcome, now_s: float) -> None:
        request = self._state.requests.get(request_id)
        if request is not None:
            end_request(self._state, request, outcome, now_s)

    def _start(self, step: StepBuilder, now_s: float) -> StepPlan:
        state = self._state
        released_rows, state.released_rows = state.released_rows, []
        copies = state.kv.host.take_copies(now_s)
        state.record.step.events += copies.swapped_out
        in_flight = step.build(released_rows, self._previous_plan, copies)
        state.in_flight.append(in_flight)
        self._previous_plan = in_flight.plan
        self._next_step_id += 1
        return in_flight.plan

    def _pop_step(self, plan: StepPlan) -> InFlightStep:
        step = self._state.in_flight.popleft()
        assert step.plan is plan, f"step {plan.step_id} is not the oldest in flight"
        self._state.kv.host.end_reads(plan.copies_in)
        return step
