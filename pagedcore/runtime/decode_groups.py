"""Which single-token rows attend together, and the gather indices and masks of each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcore.runtime.inputs import PassInputs
from pagedcore.runtime.transfer import to_device

MAX_PADDING_FRACTION = 0.3
"""A row joins a group of longer ones while at least this share less of the group's width would be padding."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """R rows of one token each, their contexts padded to L slots."""

    token_indices: Tensor | None
    """[R] int64: which tokens of the pass; None for the first R, in order."""
    num_rows: int
    block_ids: Tensor
    """[R * L / block_size] int32: blocks to gather, each row padded with its first one."""
    mask: Tensor
    """[R, 1, 1, L] in the query's dtype: 0 where the row may look, minus infinity elsewhere."""


@dataclass(frozen=True, slots=True)
class _Span:
    """The blocks [first, last) of one segment that its query sees."""

    segment: int
    first: int
    last: int

    @property
    def num_blocks(self) -> int:
        return self.last - self.first


def build_decode_groups(
    inputs: PassInputs,
    segments: Sequence[int],
    *,
    block_size: int,
    capacity_slots: int,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> list[DecodeGroup]:
    """Cut the one-token `segments` into groups that fit `capacity_slots` each. Changes nothing."""
    spans = [_span(segment, inputs.seq_lens[segment], block_size, sliding_window) for segment in segments]
    builder = _GroupBuilder(inputs, block_size, sliding_window, dtype)
    return [builder.build(group) for group in cut_into_groups(spans, capacity_slots // block_size)]


def _span(segment: int, seq_len: int, block_size: int, sliding_window: int | None) -> _Span:
    first_position = 0 if sliding_window is None else max(0, seq_len - sliding_window)
    return _Span(segment, first_position // block_size, -(-seq_len // block_size))


def cut_into_groups(spans: Sequence[_Span], capacity_blocks: int) -> list[list[_Span]]:
    """Longest first; a group ends where a row would be mostly padding, or where it would not fit the capacity."""
    groups: list[list[_Span]] = []
    for span in sorted(spans, key=lambda span: (-span.num_blocks, span.segment)):
        width = groups[-1][0].num_blocks if groups else 0
        fits = groups and (len(groups[-1]) + 1) * width <= capacity_blocks
        if fits and span.num_blocks >= (1.0 - MAX_PADDING_FRACTION) * width:
            groups[-1].append(span)
        else:
            groups.append([span])
    return [sorted(group, key=lambda span: span.segment) for group in groups]


@dataclass(frozen=True, slots=True)
class _GroupBuilder:
    inputs: PassInputs
    block_size: int
    sliding_window: int | None
    dtype: torch.dtype

    def build(self, spans: Sequence[_Span]) -> DecodeGroup:
        num_rows, width = len(spans), max(span.num_blocks for span in spans)
        device = self.inputs.block_tables.device
        segments, firsts, lasts, seq_lens, tokens = to_device(
            [span.segment for span in spans]
            + [span.first for span in spans]
            + [span.last for span in spans]
            + [self.inputs.seq_lens[span.segment] for span in spans]
            + [self.inputs.query_start_loc[span.segment] for span in spans],
            torch.int64,
            device,
        ).view(5, num_rows, 1)
        block_ids = self._block_ids(segments, firsts, lasts, width)
        positions = firsts * self.block_size + torch.arange(width * self.block_size, device=device)  # [R, L]
        is_visible = positions < seq_lens
        if self.sliding_window is not None:
            is_visible &= positions >= seq_lens - self.sliding_window
        is_prefix = all(self.inputs.query_start_loc[span.segment] == index for index, span in enumerate(spans))
        return DecodeGroup(
            token_indices=None if is_prefix else tokens.view(-1),
            num_rows=num_rows,
            block_ids=block_ids,
            mask=torch.zeros(positions.shape, dtype=self.dtype, device=device).masked_fill_(~is_visible, float("-inf"))[:, None, None],
        )

    def _block_ids(self, segments: Tensor, firsts: Tensor, lasts: Tensor, width: int) -> Tensor:
        columns = firsts + torch.arange(width, device=firsts.device)  # [R, width]
        return self.inputs.block_tables[segments, columns.where(columns < lasts, firsts)].view(-1)
