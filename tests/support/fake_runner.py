"""A runner with real paged memory and no model: what it samples depends on every slot it reads.

Two layers, as deep as a cache needs to be: layer 0 of a slot holds (token, position); layer 1 holds a hash of all layer-0
slots that the row reads through its block table; the sampled token is a hash of all layer-1 slots. A slot that was never
written, or whose block was handed to another row, holds poison of its own, so that one wrong block id changes the tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from pagedcore.core.step import AdmittedRow, PendingStep, StepPlan, StepResult
from pagedcore.outputs import Logprob

VOCAB_SIZE = 41


def next_token(token_ids: Sequence[int], *, vocab_size: int = VOCAB_SIZE) -> int:
    """What the fake model says after these tokens, without any paging."""
    layer_0 = [hash((token, position)) for position, token in enumerate(token_ids)]
    layer_1 = [hash(tuple(layer_0[: position + 1])) for position in range(len(token_ids))]
    return hash(tuple(layer_1)) % vocab_size


@dataclass(slots=True)
class Row:
    """One row of the device buffers."""

    request_id: str
    token_ids: list[int]
    block_ids: list[int]
    num_prompt_tokens: int
    wants_logprobs: bool
    wants_prompt_logprobs: bool


@dataclass(slots=True)
class FakePendingStep:
    """Runs when its result is asked for, after all steps submitted before it."""

    runner: FakeRunner
    plan: StepPlan
    outcome: StepResult | Exception | None = None

    def result(self) -> StepResult:
        self.runner.run_until(self)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


@dataclass(slots=True)
class FakeRunner:
    """Owns rows and slots. `failing_steps` raise instead of computing; `row_errors` maps request ids to a message."""

    num_blocks: int
    block_size: int
    failing_steps: set[int] = field(default_factory=set)
    row_errors: dict[str, str] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    layer_0: list[int] = field(default_factory=list)
    layer_1: list[int] = field(default_factory=list)
    host: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    """Host block -> what layers 0 and 1 of the block held that was copied there."""
    num_copied: Counter[str] = field(default_factory=Counter)
    """Blocks copied "out" and "in"."""
    computed_positions: dict[str, list[int]] = field(default_factory=dict)
    """Request id -> every position computed for it, in order, recomputed ones again."""
    _queue: deque[FakePendingStep] = field(default_factory=deque)
    _poison: count[int] = field(default_factory=lambda: count(-(10**15)))

    def __post_init__(self) -> None:
        num_slots = self.num_blocks * self.block_size
        self.layer_0 = [next(self._poison) for _ in range(num_slots)]
        self.layer_1 = [next(self._poison) for _ in range(num_slots)]

    def submit(self, plan: StepPlan) -> PendingStep:
        pending = FakePendingStep(self, plan)
        self._queue.append(pending)
        return pending

    def close(self) -> None:
        self._queue.clear()

    def run_until(self, pending: FakePendingStep) -> None:
        while pending.outcome is None:
            step = self._queue.popleft()
            step.outcome = self._run(step.plan)

    def _run(self, plan: StepPlan) -> StepResult | Exception:
        if plan.step_id not in self.failing_steps:
            self._copy(plan)
        self._apply_changes(plan)
        if plan.step_id in self.failing_steps:
            return self._fail(plan)
        for row_index, start, num_tokens in zip(plan.rows, plan.start_positions, plan.num_tokens, strict=True):
            self._write(self.rows[row_index], start, num_tokens)
        for row_index, start, num_tokens in zip(plan.rows, plan.start_positions, plan.num_tokens, strict=True):
            self._attend(self.rows[row_index], start, num_tokens)
        return self._sample(plan)

    def _fail(self, plan: StepPlan) -> Exception:
        """Compute nothing; steps after this one find garbage where its tokens should be."""
        for row_index, samples in zip(plan.rows, plan.samples, strict=True):
            if samples:
                self.rows[row_index].token_ids.append(next(self._poison))
        return RuntimeError(f"step {plan.step_id} fails on purpose")

    def _copy(self, plan: StepPlan) -> None:
        """All copies out, then all copies in, each in the order of host blocks: a plan that needs another order is wrong."""
        for block_id, host_block in sorted(plan.copies_out, key=lambda copy: copy[1]):
            self.host[host_block] = (self.layer_0[self._span(block_id)], self.layer_1[self._span(block_id)])
        for block_id, host_block in sorted(plan.copies_in, key=lambda copy: copy[1]):
            self._poison_blocks([block_id])
            if host_block in self.host:
                self.layer_0[self._span(block_id)], self.layer_1[self._span(block_id)] = self.host[host_block]
        self.num_copied.update({"out": len(plan.copies_out), "in": len(plan.copies_in)})

    def _span(self, block_id: int) -> slice:
        return slice(block_id * self.block_size, (block_id + 1) * self.block_size)

    def _apply_changes(self, plan: StepPlan) -> None:
        starts = dict(zip(plan.rows, plan.start_positions, strict=True))
        assert len(starts) == len(plan.rows), "a row stands twice in a plan"
        for row_index in plan.released_rows:
            del self.rows[row_index]
        for admitted in plan.admitted:
            assert admitted.row not in self.rows, f"row {admitted.row} is in use"
            self.rows[admitted.row] = _row_of(admitted)
            self._poison_blocks(admitted.block_ids[starts[admitted.row] // self.block_size :])
        for row_index, block_ids in plan.new_blocks:
            self.rows[row_index].block_ids.extend(block_ids)
            self._poison_blocks(block_ids)

    def _poison_blocks(self, block_ids: Sequence[int]) -> None:
        """A block that was handed out fresh holds nothing anyone may read."""
        for block_id in block_ids:
            for slot in range(block_id * self.block_size, (block_id + 1) * self.block_size):
                self.layer_0[slot], self.layer_1[slot] = next(self._poison), next(self._poison)

    def _slots(self, row: Row, num_tokens: int) -> list[int]:
        return [row.block_ids[p // self.block_size] * self.block_size + p % self.block_size for p in range(num_tokens)]

    def _write(self, row: Row, start: int, num_tokens: int) -> None:
        slots = self._slots(row, start + num_tokens)
        for position in range(start, start + num_tokens):
            self.layer_0[slots[position]] = hash((row.token_ids[position], position))
        self.computed_positions.setdefault(row.request_id, []).extend(range(start, start + num_tokens))

    def _attend(self, row: Row, start: int, num_tokens: int) -> None:
        slots = self._slots(row, start + num_tokens)
        read = tuple(self.layer_0[slot] for slot in slots)
        for position in range(start, start + num_tokens):
            self.layer_1[slots[position]] = hash(read[: position + 1])

    def _sample(self, plan: StepPlan) -> StepResult:
        result = StepResult(step_id=plan.step_id, sampled_token_ids=[])
        sampled: list[int] = []
        for row_index, start, num_tokens, samples in zip(plan.rows, plan.start_positions, plan.num_tokens, plan.samples, strict=True):
            row = self.rows[row_index]
            self._report_row(row_index, row, start, num_tokens, result)
            if samples:
                sampled.append(self._sample_row(row_index, row, start + num_tokens, result))
        result.sampled_token_ids = sampled
        return result

    def _sample_row(self, row_index: int, row: Row, position: int, result: StepResult) -> int:
        assert position == len(row.token_ids), f"row {row_index} samples position {position} with {len(row.token_ids)} tokens"
        token = hash(tuple(self.layer_1[slot] for slot in self._slots(row, position))) % VOCAB_SIZE
        row.token_ids.append(token)
        if row.wants_logprobs:
            result.logprobs[row_index] = {token: Logprob(-float(position), 1)}
        return token

    def _report_row(self, row_index: int, row: Row, start: int, num_tokens: int, result: StepResult) -> None:
        if row.request_id in self.row_errors:
            result.row_errors[row_index] = self.row_errors[row.request_id]
        if row.wants_prompt_logprobs:
            last = min(start + num_tokens, row.num_prompt_tokens - 1)
            result.prompt_logprobs[row_index] = [{row.token_ids[p]: Logprob(-float(p), 1)} for p in range(start + 1, last + 1)]


def _row_of(admitted: AdmittedRow) -> Row:
    return Row(
        admitted.request_id,
        list(admitted.token_ids),
        list(admitted.block_ids),
        admitted.num_prompt_tokens,
        admitted.params.logprobs is not None,
        admitted.params.prompt_logprobs is not None,
    )
