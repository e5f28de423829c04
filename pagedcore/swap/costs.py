"""What a block costs: copied to host memory and back, or computed again. Both are measured here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from pagedcore.core.step import AdmittedRow, Runner, StepPlan
from pagedcore.sampling_params import SamplingParams

COPIED_BLOCKS = 64
"""Blocks that are copied together in a measurement, or as many as there are."""
COMPUTED_TOKENS = 512
"""Tokens of the measured prompt, or as many as one step or request may have."""
COMPUTED_TOKENS_CPU = 64
"""The same where computing is so slow that fewer are enough."""
NUM_RUNS = 3
"""Of each measurement: the first meets kernels and memory for the first time, the fastest counts."""

_NOTHING = StepPlan(step_id=0, rows=[], num_tokens=[], start_positions=[], samples=[])


class SwappingRunner(Runner, Protocol):
    """A runner that can keep blocks in host memory."""

    def keep_host_blocks(self, num_blocks: int) -> None:
        """Make so many blocks of host memory, in the place of those that there are; 0 is none. Raises RuntimeError where it cannot."""
        ...


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """Seconds a block."""

    copy_s: float
    """To host memory and back."""
    compute_s: float
    """As part of a prompt."""

    @property
    def is_copying_cheaper(self) -> bool:
        return self.copy_s < self.compute_s


def measure_costs(runner: SwappingRunner, *, num_blocks: int, block_size: int, num_tokens: int) -> SwapCosts:
    """Copy blocks of a pool of `num_blocks`, and compute a prompt of `num_tokens`, which fit the pool.

    What the pool holds afterwards means nothing, so this is done before the engine runs. The runner is left with a few host blocks.
    """
    num_copied = min(COPIED_BLOCKS, num_blocks)
    copies = [(block_id, block_id) for block_id in range(num_copied)]
    runner.keep_host_blocks(num_copied)
    plan = replace(_NOTHING, copies_out=copies, copies_in=copies)
    copy_s = _fastest(lambda: runner.submit(plan).result())
    compute_s = _fastest(lambda: _compute(runner, num_tokens, block_size))
    return SwapCosts(copy_s / num_copied, compute_s / num_tokens * block_size)


def _compute(runner: Runner, num_tokens: int, block_size: int) -> None:
    row = AdmittedRow(
        row=0,
        request_id="cost",
        token_ids=[0] * num_tokens,
        num_prompt_tokens=num_tokens,
        block_ids=range(-(-num_tokens // block_size)),
        params=SamplingParams(temperature=0.0, max_tokens=None),
    )
    plan = replace(_NOTHING, rows=[0], num_tokens=[num_tokens], start_positions=[0], samples=[True], admitted=[row])
    runner.submit(replace(plan, total_num_tokens=num_tokens)).result()
    runner.submit(replace(_NOTHING, released_rows=[0])).result()


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest run; what `work` gave to the device is done when it returns."""
    seconds = []
    for _ in range(NUM_RUNS):
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)
