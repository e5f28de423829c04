"""The engine's steps, in bulk: sizes and times of each, and the gauges of the moment after the last."""

from __future__ import annotations

from pagedcore.core.events import StepEvents
from pagedcore.observe.catalogue import WAITING_REASONS
from pagedcore.observe.ledger import Ledger


class StepBook:
    """Owns the latest state of queue and pool and the time of the last commit; writes the step numbers of the ledger."""

    def __init__(self, ledger: Ledger, block_size: int) -> None:
        self._ledger = ledger
        self._block_size = block_size
        self._last_commit_s: float | None = None
        self._was_busy = False
        self.latest = StepEvents(now_s=0.0)
        self.num_steps = 0
        self.num_sampled_tokens = 0

    def record(self, step: StepEvents) -> None:
        """Count one batch of events. `step.avoidable_tokens` is read, so it must be filled in."""
        self._count_bulk(step)
        if step.step_id is not None:
            self._count_step(step)
        if step.step_id is not None or step.submitted_s is not None:  # the latter alone: a step of a pause
            self._last_commit_s = step.now_s
        self.latest = step
        self._was_busy = step.num_running > 0

    def _count_bulk(self, step: StepEvents) -> None:
        ledger = self._ledger
        if step.inter_token_gaps_s:
            ledger.observe_many("pagedcore_inter_token_latency_seconds", step.inter_token_gaps_s)
        if step.reuse_gaps_s:
            ledger.observe_many("pagedcore_block_reuse_gap_seconds", step.reuse_gaps_s)
        ledger.add("pagedcore_pool_acquired_blocks_total", step.num_reused_acquisitions, "reused")
        ledger.add("pagedcore_pool_acquired_blocks_total", step.num_fresh_acquisitions, "fresh")
        ledger.add("pagedcore_swapped_blocks_total", step.num_swapped_out_blocks, "out")
        ledger.add("pagedcore_swapped_blocks_total", step.num_swapped_in_blocks, "in")
        self.num_sampled_tokens += step.num_generated_tokens

    def _count_step(self, step: StepEvents) -> None:
        self.num_steps += 1
        self._ledger.observe("pagedcore_step_tokens", step.num_tokens)
        self._ledger.observe("pagedcore_step_sequences", step.num_sequences)
        if step.submitted_s is None:
            return
        began_s = step.submitted_s if self._last_commit_s is None else max(step.submitted_s, self._last_commit_s)
        duration_s = step.now_s - began_s
        self._ledger.observe("pagedcore_step_seconds", duration_s)
        if self._was_busy and self._last_commit_s is not None:
            self._ledger.observe("pagedcore_step_gap_seconds", began_s - self._last_commit_s)
        for reason, num_tokens in step.avoidable_tokens.items():
            self._ledger.add("pagedcore_miss_penalty_seconds_total", duration_s * num_tokens / max(step.num_tokens, 1), reason)

    @property
    def kv_cache_usage(self) -> float:
        num_blocks = self.latest.num_active_blocks + self.latest.num_cached_blocks + self.latest.num_free_blocks
        return self.latest.num_active_blocks / num_blocks if num_blocks else 0.0

    @property
    def kv_utilization(self) -> float:
        num_slots = self.latest.num_active_blocks * self._block_size
        return self.latest.num_live_tokens / num_slots if num_slots else 0.0

    def set_gauges(self) -> None:
        """Write the latest state to the ledger."""
        step, put = self.latest, self._ledger.set
        put("pagedcore_open_requests", step.num_running, "running")
        put("pagedcore_open_requests", step.num_waiting - step.num_swapped, "waiting")
        put("pagedcore_open_requests", step.num_swapped, "swapped")
        for reason in WAITING_REASONS:
            put("pagedcore_waiting_requests", step.waiting_by_reason.get(reason, 0), reason)
        put("pagedcore_blocks", step.num_active_blocks, "active")
        put("pagedcore_blocks", step.num_cached_blocks, "cached")
        put("pagedcore_blocks", step.num_free_blocks, "free")
        put("pagedcore_kv_cache_usage_ratio", self.kv_cache_usage)
        put("pagedcore_kv_utilization_ratio", self.kv_utilization)
