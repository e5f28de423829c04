"""The engine's one contract with the device: a frozen `StepPlan` goes down, one `StepResult` comes up.

A running request owns a *row* of the device's persistent buffers (token ids, block table, sampling state) from its
admission to its end or preemption. A plan carries only what changed: rows that enter, rows that leave, blocks appended,
and for each scheduled row how many tokens to compute. Token ids sampled on the device are written to the row there, so
step N + 1 can be planned before step N's tokens are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagedcore.outputs import Logprob
from pagedcore.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRow:
    """A request that enters the device buffers: new, or back after a preemption."""

    row: int
    """Index in the device buffers, in [0, max_num_seqs)."""
    request_id: str
    token_ids: Sequence[int]
    """All known tokens: the prompt, and after a preemption what was generated so far."""
    num_prompt_tokens: int
    block_ids: Sequence[int]
    params: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    """Masked while fewer than params.min_tokens are generated."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. Rows in order; the runner applies `released_rows`, then `admitted`, then `new_blocks`, then computes. Before
    anything is written it makes the copies: all of `copies_out`, then all of `copies_in`, behind the work of earlier steps.

    Row i computes tokens [start_positions[i], start_positions[i] + num_tokens[i]) and, where `samples[i]`, draws the
    token at position start_positions[i] + num_tokens[i]. All rows write their K and V before any row attends, layer by
    layer, so a row may read blocks that another row of the same step fills.
    """

    step_id: int
    rows: Sequence[int]
    num_tokens: Sequence[int]
    start_positions: Sequence[int]
    samples: Sequence[bool]
    admitted: Sequence[AdmittedRow] = ()
    released_rows: Sequence[int] = ()
    new_blocks: Sequence[tuple[int, Sequence[int]]] = ()
    """(row, block ids appended to its table)."""
    total_num_tokens: int = 0
    copies_out: Sequence[tuple[int, int]] = ()
    """(device block, host block): what the first holds goes to the second. No host block stands there twice."""
    copies_in: Sequence[tuple[int, int]] = ()
    """(device block, host block): what the second holds goes to the first. No device block stands there twice."""


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What the device made of one plan."""

    step_id: int
    sampled_token_ids: Sequence[int]
    """One a sampling row, in plan order; the entry of a row in `row_errors` is meaningless."""
    logprobs: dict[int, dict[int, Logprob]] = field(default_factory=dict)
    """Device row -> the sampled token's dict, for rows that asked."""
    prompt_logprobs: dict[int, list[dict[int, Logprob]]] = field(default_factory=dict)
    """Device row -> dicts for the prompt positions start + 1 ... that this step's tokens predict (the caller prepends None)."""
    row_errors: dict[int, str] = field(default_factory=dict)
    """Device row -> why its request cannot go on (such as: every token is masked)."""


class PendingStep(Protocol):
    """A step that was handed to the device."""

    def result(self) -> StepResult:
        """Wait for the step. Raises what the step raised; the state of its rows is then unknown."""
        ...


class Runner(Protocol):
    """Device work behind the contract: the real `ModelRunner`, or a fake one in tests."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step and return at once. Steps run in the order of submission."""
        ...

    def close(self) -> None:
        """Give the device memory back."""
        ...
