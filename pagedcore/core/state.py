"""What the parts of the scheduler share."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from pagedcore.core.kv_cache_manager import KVCacheManager
from pagedcore.core.limits import SchedulerLimits
from pagedcore.core.request import Request, RequestState
from pagedcore.core.step import StepPlan
from pagedcore.core.step_record import StepRecord
from pagedcore.tenancy.request_queue import RequestQueue
from pagedcore.tenancy.tenant_queue import TenantQueue


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A plan on the device, with the requests of its rows as they were when it was made."""

    plan: StepPlan
    requests: list[Request]
    """One a row."""
    sampling_requests: list[Request]
    """One a sampling row."""
    sampled_positions: list[int]
    """The position of each sampling row's new token."""
    num_prefill_tokens: int


class SchedulerState:
    """Owns waiting, running and the device rows; only the scheduler's own parts hold it."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.record = StepRecord()
        self.kv = KVCacheManager(limits, self.record)
        self.requests: dict[str, Request] = {}
        """Every request that has not ended."""
        self.waiting: TenantQueue[Request] = TenantQueue(limits.tenants.max_running)
        self.running: RequestQueue[Request] = RequestQueue()
        self.in_flight: deque[InFlightStep] = deque()
        self.last_done_step_id = -1
        self.released_rows: list[int] = []
        """Given back since the last plan, which the device hears of with the next one."""
        self.num_live_tokens = 0
        """Computed tokens of running requests."""
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))

    def is_in_flight(self, request: Request) -> bool:
        """Whether a step that computes this request is not yet committed."""
        return request.last_step_id > self.last_done_step_id

    def enter_running(self, request: Request) -> None:
        """Move a request from waiting to running, onto a device row."""
        self.waiting.start(request)
        self.running.add(request)
        self.kv.host.unwatch(request.request_id)
        request.state = RequestState.RUNNING
        request.waiting_reason = None
        request.row = self._free_rows.pop()

    def leave_running(self, request: Request, now_s: float) -> None:
        """Take a request's row and blocks; blocks that a step in flight uses come back after it."""
        self.running.remove(request)
        self.waiting.stop(request)
        self.released_rows.append(request.row)
        self._free_rows.append(request.row)
        self.num_live_tokens -= request.num_computed_tokens
        request.num_ever_computed_tokens = max(request.num_ever_computed_tokens, request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.decode_limit = 0
        request.is_plain = False
        self.kv.free(request, now_s, in_flight=self.is_in_flight(request))

    def check_invariants(self) -> None:
        """Raises AssertionError when queues, rows, blocks and progress disagree."""
        self.waiting.check_invariants(Counter(request.tenant for request in self.running))
        self.running.check_invariants()
        running, waiting = list(self.running), list(self.waiting)
        assert {r.request_id for r in running + waiting} == set(self.requests), "a request is in no queue, or in two"
        rows = [r.row for r in running]
        assert sorted(rows + self._free_rows) == list(range(self.limits.max_num_seqs)), "a device row is lost or doubled"
        assert self.num_live_tokens == sum(r.num_computed_tokens for r in running), "num_live_tokens drifted"
        num_filled, num_slots = self.kv.num_filled_slots(self.num_live_tokens), self.kv.pool.num_active_blocks * self.limits.block_size
        assert 0 <= num_filled <= num_slots, f"{num_filled} of {num_slots} active slots are filled"
        for request in running:
            assert request.state is RequestState.RUNNING
            assert request.num_computed_tokens < request.num_known_tokens <= request.max_total_tokens, (
                f"{request.request_id!r} ran past its end"
            )
            assert request.num_pending_tokens <= len(self.in_flight), f"{request.request_id!r} waits for more tokens than steps in flight"
        for request in waiting:
            assert request.state is RequestState.WAITING
            assert not request.block_ids, f"waiting request {request.request_id!r} holds blocks"
        self.kv.check_invariants(running)
        self.kv.host.check_invariants(copy for step in self.in_flight for copy in step.plan.copies_in)
