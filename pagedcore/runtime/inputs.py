"""From a plan's rows to the flat tensors of one forward pass, computed on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pagedcore.runtime.rows import RowBuffers
from pagedcore.runtime.transfer import to_device
from pagedcore_kernels import compute_slot_mapping


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one row, computed in one pass."""

    row: int
    start: int
    num_tokens: int
    samples: bool
    """Whether the token after the last one is drawn."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class PassInputs:
    """One forward pass: S segments of T tokens. Lists are what the host knows, tensors live on the device."""

    query_start_loc: list[int]
    """[S + 1], where each segment's tokens begin."""
    seq_lens: list[int]
    """[S], tokens of each sequence with this pass's."""
    device_query_start_loc: Tensor  # [S + 1] int32
    device_seq_lens: Tensor  # [S] int32
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64
    block_tables: Tensor  # [S, max_blocks] int32
    logits_indices: Tensor  # [N] int64
    opened_blocks: Tensor | None
    """int64: blocks whose first slot is written in this pass and whose last is not; see `KVCache`."""

    @property
    def num_decodes(self) -> int:
        """Sequences of one token before the first of several."""
        counts = (last - first for first, last in pairwise(self.query_start_loc))
        return next((index for index, count in enumerate(counts) if count > 1), len(self.seq_lens))


def build_inputs(segments: Sequence[Segment], logits_indices: Sequence[int], buffers: RowBuffers, block_size: int) -> PassInputs:
    """Read the tokens, positions and slots of the segments from the row buffers. Copies one small tensor to the device."""
    query_start_loc = [0, *accumulate(segment.num_tokens for segment in segments)]
    opening = [segment for segment in segments if _leaves_open_block(segment, block_size)]
    rows, starts, counts, locations, indices, open_rows, open_columns = _copy_lists(
        [segment.row for segment in segments],
        [segment.start for segment in segments],
        [segment.num_tokens for segment in segments],
        query_start_loc,
        logits_indices,
        [segment.row for segment in opening],
        [segment.end // block_size for segment in opening],
        device=buffers.device,
    )
    token_rows, positions = _expand(rows, starts, counts, query_start_loc[-1])
    return PassInputs(
        query_start_loc=query_start_loc,
        seq_lens=[segment.end for segment in segments],
        device_query_start_loc=locations.int(),
        device_seq_lens=(starts + counts).int(),
        token_ids=buffers.token_ids[token_rows, positions].long(),
        positions=positions,
        slot_mapping=compute_slot_mapping(buffers.block_table, token_rows, positions, block_size),
        block_tables=buffers.block_table.index_select(0, rows),
        logits_indices=indices,
        opened_blocks=buffers.block_table[open_rows, open_columns].long() if opening else None,
    )


def _leaves_open_block(segment: Segment, block_size: int) -> bool:
    """Whether the segment writes the first slot of its last block, but not all of that block."""
    return segment.end % block_size != 0 and segment.end // block_size * block_size >= segment.start


def _copy_lists(*lists: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    joined = to_device([value for values in lists for value in values], torch.int64, device)
    return joined.split([len(values) for values in lists])


def _expand(rows: Tensor, starts: Tensor, counts: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Row and position of each token."""
    if num_tokens == len(rows):
        return rows, starts
    segment_of_token = torch.repeat_interleave(counts, output_size=num_tokens)
    first_index = counts.cumsum(0) - counts
    offsets = torch.arange(num_tokens, device=rows.device) - first_index[segment_of_token]
    return rows[segment_of_token], starts[segment_of_token] + offsets
