"""Builders for tests of the core: small defaults, and a driver that plays engine with a fake clock."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedcore.core.events import BlockEvicted, Event, StepEvents
from pagedcore.core.limits import SchedulerLimits
from pagedcore.core.scheduler import Scheduler
from pagedcore.core.step import PendingStep, StepPlan
from pagedcore.errors import StepFailedError
from pagedcore.messages import AddRequest, RequestUpdate
from pagedcore.sampling_params import SamplingParams
from support.fake_runner import FakeRunner

BLOCK_SIZE = 4


def make_limits(**changes: Any) -> SchedulerLimits:
    defaults: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_blocks": 16,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "watermark_fraction": 0.0,
    }
    return SchedulerLimits(**{**defaults, **changes})


def make_request(request_id: str, prompt: Sequence[int], *, max_tokens: int | None = 4, **changes: Any) -> AddRequest:
    """A request; keywords that SamplingParams knows go into its params, but for stop_token_ids."""
    names = [name for name in changes if name in SamplingParams.__dataclass_fields__ and name != "stop_token_ids"]
    params = SamplingParams(max_tokens=max_tokens, seed=0, **{name: changes.pop(name) for name in names})
    defaults: dict[str, Any] = {"group_id": request_id, "params": params, "arrival_s": 0.0}
    return AddRequest(request_id=request_id, prompt_token_ids=list(prompt), **{**defaults, **changes})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCounts:
    """How much there is of everything now, and how often rare things happened since the start."""

    num_waiting: int
    num_running: int
    num_active_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_prefix_waits: int
    """Times that a request stood back while another computed its prefix."""
    num_bypasses: int
    """Times that a request was admitted past one that waits for blocks."""
    num_stalls: int
    """Times that a running request waited for blocks of a step in flight."""
    num_deferred_frees: int
    """Tables whose release waited for a step in flight."""


def counts_of(scheduler: Scheduler) -> SchedulerCounts:
    """A snapshot of sizes and rare-path counters."""
    state, pool, record = scheduler._state, scheduler.pool, scheduler._state.record
    return SchedulerCounts(
        num_waiting=len(state.waiting),
        num_running=len(state.running),
        num_active_blocks=pool.num_active_blocks,
        num_cached_blocks=pool.num_cached_blocks,
        num_free_blocks=pool.num_free_blocks,
        num_prefix_waits=record.num_prefix_waits,
        num_bypasses=record.num_bypasses,
        num_stalls=record.num_stalls,
        num_deferred_frees=record.num_deferred_frees,
    )


@dataclass(slots=True)
class Driver:
    """Plays the engine: schedule, submit, commit the oldest. The clock ticks one second a turn."""

    scheduler: Scheduler
    runner: FakeRunner
    now_s: float = 0.0
    in_flight: deque[tuple[StepPlan, PendingStep]] = field(default_factory=deque)
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    last: dict[str, RequestUpdate] = field(default_factory=dict)
    """The last update of each request that ended."""
    first: dict[str, RequestUpdate] = field(default_factory=dict)
    """The update with each request's first token."""
    logprobs: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    events: list[Event] = field(default_factory=list)
    steps: list[StepEvents] = field(default_factory=list)
    tables: dict[int, list[int]] = field(default_factory=dict)
    """Device row -> its block table after the plans made so far."""
    blocks_in_flight: dict[int, set[int]] = field(default_factory=dict)
    """Step id -> the blocks that its rows use."""
    host_blocks_in_flight: dict[int, set[int]] = field(default_factory=dict)
    """Step id -> the host blocks that it reads."""
    steps_with_copies: set[int] = field(default_factory=set)

    @classmethod
    def make(cls, **changes: Any) -> Driver:
        limits = make_limits(**changes)
        return cls(Scheduler(limits), FakeRunner(limits.num_blocks, limits.block_size))

    def add(self, request_id: str, prompt: Sequence[int], **changes: Any) -> None:
        self.scheduler.add(make_request(request_id, prompt, **{"arrival_s": self.now_s, **changes}), self.now_s)
        self.take()

    def turn(self) -> StepPlan | None:
        """One turn of the engine's loop; returns the plan made in it."""
        self.now_s += 1.0
        plan = self.schedule()
        if self.in_flight and (plan is None or len(self.in_flight) >= self.scheduler.limits.num_in_flight_steps):
            self.commit()
        return plan

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now_s)
        if plan is not None:
            self._track_blocks(plan)
            self.in_flight.append((plan, self.runner.submit(plan)))
        self.take()
        return plan

    def _track_blocks(self, plan: StepPlan) -> None:
        """The plan keeps its limits, and a block that a step in flight uses is not handed out again before that step is committed."""
        limits = self.scheduler.limits
        assert sum(plan.num_tokens) == plan.total_num_tokens <= limits.max_num_batched_tokens
        assert len(plan.rows) <= limits.max_num_seqs
        assert min(plan.num_tokens) >= 1
        starts = dict(zip(plan.rows, plan.start_positions, strict=True))
        block_size = limits.block_size
        fresh = {block_id for _, block_ids in plan.new_blocks for block_id in block_ids}
        for admitted in plan.admitted:
            self.tables[admitted.row] = list(admitted.block_ids)
            fresh.update(admitted.block_ids[starts[admitted.row] // block_size :])
        for row, block_ids in plan.new_blocks:
            self.tables[row].extend(block_ids)
        fresh.update(block_id for block_id, _ in plan.copies_in)
        self._track_copies(plan)
        for step_id, used in self.blocks_in_flight.items():
            assert fresh.isdisjoint(used), f"blocks {fresh & used} are handed out while step {step_id} uses them"
        self.blocks_in_flight[plan.step_id] = {block_id for row in plan.rows for block_id in self.tables[row]}

    def _track_copies(self, plan: StepPlan) -> None:
        """What is copied out is in use by no step in flight; no host block is filled twice or while it is read, and no block twice."""
        out, host_blocks = {block_id for block_id, _ in plan.copies_out}, [host_block for _, host_block in plan.copies_out]
        assert len(set(host_blocks)) == len(host_blocks), f"host blocks {host_blocks} are filled twice in step {plan.step_id}"
        earlier = set().union(*self.host_blocks_in_flight.values())
        assert earlier.isdisjoint(host_blocks), f"host blocks {earlier & set(host_blocks)} are filled while a step in flight reads them"
        assert set().union(*self.blocks_in_flight.values()).isdisjoint(out), f"step {plan.step_id} copies out blocks that are in use"
        assert len({block_id for block_id, _ in plan.copies_in}) == len(plan.copies_in), "a block is filled twice"
        self.host_blocks_in_flight[plan.step_id] = {host_block for _, host_block in plan.copies_in}
        if plan.copies_out or plan.copies_in:
            self.steps_with_copies.add(plan.step_id)

    def commit(self) -> None:
        """Wait for the oldest step and commit it, or fail it."""
        plan, pending = self.in_flight.popleft()
        del self.blocks_in_flight[plan.step_id], self.host_blocks_in_flight[plan.step_id]
        try:
            result = pending.result()
        except RuntimeError as error:
            self.scheduler.fail(plan, StepFailedError(str(error)), self.now_s)
        else:
            self.scheduler.commit(plan, result, self.now_s)
        self.take()

    def take(self) -> None:
        """Collect what the scheduler has to say, and check its invariants."""
        for update in self.scheduler.take_updates():
            assert update.request_id not in self.last, f"{update.request_id!r} got an update after its last one"
            if update.new_token_ids and not self.tokens[update.request_id]:
                self.first[update.request_id] = update
            self.tokens[update.request_id] += update.new_token_ids
            self.logprobs[update.request_id] += update.new_logprobs or []
            if update.finish_reason is not None:
                self.last[update.request_id] = update
        step = self.scheduler.take_events()
        self.steps.append(step)
        self.events += step.events
        self.scheduler.check_invariants()
        assert step.num_active_blocks + step.num_cached_blocks + step.num_free_blocks == self.scheduler.limits.num_blocks

    def run(self, max_turns: int = 10_000) -> None:
        """Turn until there is no work."""
        for _ in range(max_turns):
            if not self.scheduler.has_work:
                return
            self.turn()
        raise AssertionError(f"still not done after {max_turns} turns")

    def counts(self) -> SchedulerCounts:
        return counts_of(self.scheduler)

    def events_of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def evicted(self) -> list[BlockEvicted]:
        return self.events_of(BlockEvicted)
