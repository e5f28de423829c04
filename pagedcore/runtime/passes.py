"""How a plan's rows are cut into forward passes: one, unless prompt log probabilities would need too many logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedcore.core.step import StepPlan
from pagedcore.runtime.inputs import Segment
from pagedcore.runtime.rows import RowBuffers

PROMPT_LOGPROB_TOKENS = 256
"""Most tokens of one pass of rows that want prompt log probabilities: bounds the logits, one row of them a token."""


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """Segments that run together. Logits come in the order: sampling segments, then prompt log probabilities."""

    segments: list[Segment]
    prompt_logprobs: list[tuple[Segment, int]]
    """Segments with the number of their first tokens that predict a prompt token."""

    @property
    def logits_indices(self) -> list[int]:
        """Which tokens of the pass need logits."""
        sampled: list[int] = []
        first_token: dict[int, int] = {}
        num_tokens = 0
        for segment in self.segments:
            first_token[segment.row] = num_tokens
            num_tokens += segment.num_tokens
            if segment.samples:
                sampled.append(num_tokens - 1)
        for segment, count in self.prompt_logprobs:
            sampled.extend(range(first_token[segment.row], first_token[segment.row] + count))
        return sampled


def split_into_passes(plan: StepPlan, buffers: RowBuffers) -> list[ForwardPass]:
    """Rows that want prompt log probabilities first, in bounded passes: they read no block of another row, and the others,
    which may read theirs, all run in the last pass. A row's pieces run in order.
    """
    segments = [Segment(*columns) for columns in zip(plan.rows, plan.start_positions, plan.num_tokens, plan.samples, strict=True)]
    wanting = [segment for segment in segments if _num_predicting(segment, buffers)]
    if not wanting:
        return [ForwardPass(segments, [])] if segments else []
    passes = _bounded_passes(wanting, buffers)
    others = [segment for segment in segments if not _num_predicting(segment, buffers)]
    return [*passes, ForwardPass(others, [])] if others else passes


def _num_predicting(segment: Segment, buffers: RowBuffers) -> int:
    """Tokens of the segment whose successor is a prompt token, if the row wants its log probability."""
    row = buffers[segment.row]
    if not row.wants_prompt_logprobs:
        return 0
    return max(0, min(segment.end, row.request.num_prompt_tokens - 1) - segment.start)


def _bounded_passes(segments: Sequence[Segment], buffers: RowBuffers) -> list[ForwardPass]:
    passes: list[list[Segment]] = [[]]
    room = PROMPT_LOGPROB_TOKENS
    for segment in segments:
        start = segment.start
        while start < segment.end:
            if room == 0:
                passes.append([])
                room = PROMPT_LOGPROB_TOKENS
            count = min(room, segment.end - start)
            passes[-1].append(Segment(segment.row, start, count, segment.samples and start + count == segment.end))
            start += count
            room -= count
    return [ForwardPass(parts, _predicting(parts, buffers)) for parts in passes]


def _predicting(segments: Sequence[Segment], buffers: RowBuffers) -> list[tuple[Segment, int]]:
    counted = [(segment, _num_predicting(segment, buffers)) for segment in segments]
    return [(segment, count) for segment, count in counted if count]
