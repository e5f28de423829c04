"""Who leaves the waiting queue, and why the others stay."""

from __future__ import annotations

from collections import Counter

from pagedcore.core.events import Admitted, PassedOver, Resumed, WaitingReason
from pagedcore.core.kv_cache_manager import PrefixMatch
from pagedcore.core.placement import place
from pagedcore.core.request import Request
from pagedcore.core.state import SchedulerState
from pagedcore.core.step_builder import StepBuilder
from pagedcore.host_tier.swapped import Swapped

MAX_BLOCKED = 16
"""Requests that one plan finds no blocks for before it stops looking: each look walks the prefix, and hundreds may wait alike."""


class Admission:
    """Takes requests from the waiting queue into the step, in order.

    A request is passed over (later ones may go first) while another computes its prefix, while its tenant has no share of the cache
    left for it, and, a bounded number of times, while it waits for blocks. Behind a preempted request nobody passes, but for its
    tenant's share. Those that their tenants' quotas of rows hold back are not even looked at.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._num_passed_over = self._num_over_share = 0
        self._stop_reason: WaitingReason = "token_budget"
        self._stop_priority: int | None = None

    def admit(self, step: StepBuilder, now_s: float) -> None:
        """Admit and resume what fits into the rest of the step's budget."""
        line = self._state.waiting.line
        self._state.record.step.planned_s = now_s
        for request, is_held in self._state.waiting.settle():
            self._wait_for("tenant_quota" if is_held else None, request, now_s)
        self._num_passed_over = self._num_over_share = 0
        over_share: set[str] = set()
        self._stop_priority = None
        blocked: Request | None = None
        num_blocked = 0
        while self._num_passed_over < len(line):
            request = line[self._num_passed_over]
            reason = self._closed(step, blocked)
            if reason is not None:
                self._stop(reason, request)
                return
            match = None if request.tenant in over_share else self._prefix_or_wait(request)
            lacks = None if match is None else self._lacks(request, match, step)
            if match is not None and lacks is None:
                self._count_bypass(blocked)
                self._enter(request, match, step, now_s)
            elif lacks == "tenant_quota" or request.tenant in over_share:
                over_share.add(request.tenant)
                self._num_over_share += 1
                self._pass_over("tenant_quota", request, now_s)
            elif request.was_admitted or request.num_bypasses >= self._state.limits.max_bypasses or num_blocked >= MAX_BLOCKED:
                self._stop("blocks", request)
                return
            else:
                self._pass_over("blocks", request, now_s)
                if match is not None:
                    blocked = blocked or request
                    num_blocked += 1

    def hold_back(self, now_s: float, *, is_over: bool) -> None:
        """No plan is made, since an idle engine waits for a fuller batch; or that is over."""
        for request in self._state.waiting.line:
            self._wait_for(None if is_over else "batch_window", request, now_s)

    def waiting_reason(self, request: Request) -> WaitingReason:
        """Why this waiting request does not run."""
        if request.waiting_reason is not None:
            return request.waiting_reason
        if request in self._state.waiting.new:
            return "next_step"
        is_behind_class = self._stop_priority is not None and request.order_key[0] > self._stop_priority
        return "priority" if is_behind_class else self._stop_reason

    @property
    def stop_key(self) -> tuple[int, WaitingReason] | None:
        """The priority class of the request at which the last plan stopped looking, and why; None when it looked at all."""
        return None if self._stop_priority is None else (self._stop_priority, self._stop_reason)

    def waiting_by_reason(self) -> dict[str, int]:
        """Waiting requests by reason, looking at none but those that have come since the last plan."""
        line, new, stop_priority = self._state.waiting.line, self._state.waiting.new, self._stop_priority
        num_behind = 0 if stop_priority is None else line.num_behind_class(stop_priority)
        num_behind -= sum(stop_priority is not None and request.order_key[0] > stop_priority for request in new)
        num_seen = len(line) - len(new)
        num_passed_over = min(self._num_passed_over, num_seen - num_behind)
        num_over_share = min(self._num_over_share, num_passed_over)
        num_over_quota = num_over_share + self._state.waiting.num_held
        counts = Counter(blocks=num_passed_over - num_over_share, tenant_quota=num_over_quota, priority=num_behind)
        counts[self._stop_reason] += num_seen - num_behind - num_passed_over
        counts.update(map(self.waiting_reason, new))
        return dict(+counts)

    def _closed(self, step: StepBuilder, blocked: Request | None) -> WaitingReason | None:
        """Why nobody else can be admitted in this step, or need be looked at."""
        state, limits = self._state, self._state.limits
        if len(state.running) >= limits.max_num_seqs:
            return "max_num_seqs"
        if step.num_tokens >= limits.max_num_batched_tokens:
            return "token_budget"
        is_pool_full = len(state.running) and state.kv.pool.num_available_blocks <= self._reserve(step)
        has_aged = blocked is not None and blocked.num_bypasses >= limits.max_bypasses
        return "blocks" if is_pool_full or has_aged or self._num_passed_over >= limits.max_num_seqs else None

    def _reserve(self, step: StepBuilder) -> int:
        """Blocks that an admission leaves alone while others run: the watermark, and what they still need for known tokens."""
        return self._state.limits.watermark_blocks + step.num_promised_blocks if len(self._state.running) else 0

    def _pass_over(self, reason: WaitingReason, request: Request, now_s: float) -> None:
        self._wait_for(reason, request, now_s)
        self._num_passed_over += 1

    def _wait_for(self, reason: WaitingReason | None, request: Request, now_s: float) -> None:
        if request.waiting_reason != reason:
            self._state.record.add(PassedOver(request.request_id, now_s, reason))
        request.waiting_reason = reason

    def _stop(self, reason: WaitingReason, request: Request) -> None:
        self._stop_reason = reason
        self._stop_priority = request.order_key[0]

    def _prefix_or_wait(self, request: Request) -> PrefixMatch | None:
        """What the request can share now; None while it should wait: for its own step in flight, or for a prefix being computed."""
        state = self._state
        if request.was_admitted:
            return None if state.is_in_flight(request) else state.kv.match_prefix(request)
        if request.num_prefix_waits >= state.limits.max_prefix_wait_steps:
            return state.kv.match_prefix(request)
        if request.awaited_hash is None or not state.kv.is_being_computed(request.awaited_hash):
            match = state.kv.match_prefix(request)
            if match.missing_hash is None or not state.kv.is_being_computed(match.missing_hash):
                return match
            request.awaited_hash = match.missing_hash
        request.num_prefix_waits += 1
        state.record.num_prefix_waits += 1
        return None

    def _lacks(self, request: Request, match: PrefixMatch, step: StepBuilder) -> WaitingReason | None:
        """None with room for all known tokens, beside what running requests still need for theirs and the watermark; alone, for itself.

        After max_preemptions: room for the whole final length, once and for all. Its tenant's share of the cache is another matter.
        """
        state, limits = self._state, self._state.limits
        is_last_try = request.num_preemptions >= limits.max_preemptions
        num_tokens = request.last_position if is_last_try else request.num_known_tokens
        num_needed = limits.blocks_for(num_tokens) - match.num_live_blocks
        if num_needed + self._reserve(step) > state.kv.pool.num_available_blocks:
            return "blocks"
        return None if num_needed <= state.kv.pool.num_available_to(request.tenant) else "tenant_quota"

    def _count_bypass(self, blocked: Request | None) -> None:
        if blocked is not None:
            blocked.num_bypasses += 1
            self._state.record.num_bypasses += 1

    def _enter(self, request: Request, match: PrefixMatch, step: StepBuilder, now_s: float) -> None:
        """Move the request to a row, give it its prefix and its first chunk."""
        state, kv = self._state, self._state.kv
        is_first = not request.was_admitted
        state.enter_running(request)
        num_hit_tokens = match.num_blocks * state.limits.block_size
        if is_first:
            self._record_lookup(request, match, now_s)
        else:
            num_recomputed = max(0, request.num_lost_tokens - num_hit_tokens)
            state.record.add(Resumed(request.request_id, now_s, num_recomputed))
            if match.num_host_blocks:
                state.record.add(Swapped(request.request_id, now_s, "in", match.num_host_blocks))
        kv.share(request, match, now_s, is_counted=is_first and request.add_request.choice_index == 0)
        request.num_computed_tokens = num_hit_tokens
        state.num_live_tokens += num_hit_tokens
        if request.num_preemptions >= state.limits.max_preemptions:
            request.is_protected = True
            kv.grow(request, request.last_position, now_s)
        place(state, step, request, state.limits.max_num_batched_tokens - step.num_tokens, now_s)
        kv.announce(request)
        step.add_admitted(request)

    def _record_lookup(self, request: Request, match: PrefixMatch, now_s: float) -> None:
        report = self._state.kv.lookup(request, match)
        request.admitted_s = now_s
        request.cached_prompt_tokens = report.num_hit_tokens
        request.num_ever_computed_tokens = report.num_hit_tokens
        request.cache_report = report.provisional_report()
        is_counted = request.add_request.choice_index == 0
        self._state.record.add(Admitted(request.request_id, now_s, report if is_counted else None))
