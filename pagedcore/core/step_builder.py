"""One plan while it is being made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from pagedcore.core.request import Request
from pagedcore.core.state import InFlightStep
from pagedcore.core.step import AdmittedRow, StepPlan
from pagedcore.host_tier.host_tier import Copies

T = TypeVar("T")


class StepBuilder:
    """Owns the columns of one plan. A plain decode row costs three appends; rows that differ are noted apart."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.requests: list[Request] = []
        self.rows: list[int] = []
        self.start_positions: list[int] = []
        self.chunks: dict[int, tuple[int, bool]] = {}
        """Row index -> (tokens, samples), for rows that are not (1, True)."""
        self.admitted: list[AdmittedRow] = []
        self.new_blocks: list[tuple[int, Sequence[int]]] = []
        self.num_extra_tokens = 0
        """Tokens beyond one a row."""
        self.num_prefill_tokens = 0
        self.num_promised_blocks = 0
        """Blocks that requests on rows still need for tokens that are known."""

    @property
    def num_tokens(self) -> int:
        return len(self.rows) + self.num_extra_tokens

    def add_row(self, request: Request, start: int, num_tokens: int, *, samples: bool) -> None:
        """Append a row."""
        if num_tokens != 1 or not samples:
            self.chunks[len(self.rows)] = (num_tokens, samples)
            self.num_extra_tokens += num_tokens - 1
        self.requests.append(request)
        self.rows.append(request.row)
        self.start_positions.append(start)

    def add_admitted(self, request: Request) -> None:
        """Describe a request that enters the device buffers with this plan."""
        self.admitted.append(
            AdmittedRow(
                row=request.row,
                request_id=request.request_id,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=tuple(request.block_ids),
                params=request.add_request.params,
                stop_token_ids=request.stop_token_ids,
                bad_words_token_ids=request.add_request.bad_words_token_ids,
            )
        )

    def build(self, released_rows: Sequence[int], previous: StepPlan | None, copies: Copies) -> InFlightStep:
        """The finished step. Columns equal to the previous plan's are the same objects, so that a runner can tell by identity."""
        num_tokens, samples = self._columns()
        plan = StepPlan(
            step_id=self.step_id,
            rows=_reuse(tuple(self.rows), None if previous is None else previous.rows),
            num_tokens=_reuse(num_tokens, None if previous is None else previous.num_tokens),
            start_positions=self.start_positions,
            samples=_reuse(samples, None if previous is None else previous.samples),
            admitted=self.admitted,
            released_rows=released_rows,
            new_blocks=self.new_blocks,
            total_num_tokens=self.num_tokens,
            copies_out=copies.out,
            copies_in=copies.back,
        )
        sampling, positions = self._sampling_rows()
        return InFlightStep(plan, self.requests, sampling, positions, self.num_prefill_tokens)

    def _columns(self) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        num_rows = len(self.rows)
        if not self.chunks:
            return (1,) * num_rows, (True,) * num_rows
        num_tokens, samples = [1] * num_rows, [True] * num_rows
        for index, (count, is_sampling) in self.chunks.items():
            num_tokens[index], samples[index] = count, is_sampling
        return tuple(num_tokens), tuple(samples)

    def _sampling_rows(self) -> tuple[list[Request], list[int]]:
        positions = [start + 1 for start in self.start_positions]
        if not self.chunks:
            return self.requests, positions
        for index, (count, _) in self.chunks.items():
            positions[index] = self.start_positions[index] + count
        silent = {index for index, (_, samples) in self.chunks.items() if not samples}
        kept = [index for index in range(len(positions)) if index not in silent]
        return [self.requests[index] for index in kept], [positions[index] for index in kept]


def _reuse(value: tuple[T, ...], previous: Sequence[T] | None) -> Sequence[T]:
    return previous if previous is not None and value == previous else value
