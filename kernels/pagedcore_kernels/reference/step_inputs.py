"""Inputs of a step in which every row advances by one token, from the rows' own buffers, in plain torch. R rows, S sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PADDING_ROW = -1
PADDING_SLOT = -1


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Tensors of one decode step of S sequences, padding included. They keep their addresses, so a graph may read them."""

    token_ids: Tensor  # [S] int64
    positions: Tensor  # [S] int64
    slot_mapping: Tensor  # [S] int64, PADDING_SLOT for padding
    seq_lens: Tensor  # [S] int32, 0 for padding
    block_tables: Tensor  # [S, max_blocks] int32; of meaning up to each sequence's last block

    @classmethod
    def allocate(cls, num_sequences: int, max_blocks: int, device: torch.device | str) -> DecodeInputs:
        """Inputs of padding alone."""
        return cls(
            token_ids=torch.zeros(num_sequences, dtype=torch.int64, device=device),
            positions=torch.zeros(num_sequences, dtype=torch.int64, device=device),
            slot_mapping=torch.full((num_sequences,), PADDING_SLOT, dtype=torch.int64, device=device),
            seq_lens=torch.zeros(num_sequences, dtype=torch.int32, device=device),
            block_tables=torch.zeros(num_sequences, max_blocks, dtype=torch.int32, device=device),
        )

    def head(self, num_sequences: int) -> DecodeInputs:
        """The first `num_sequences`, views: a graph for that many sequences."""
        tensors = (self.token_ids, self.positions, self.slot_mapping, self.seq_lens, self.block_tables)
        return DecodeInputs(*(tensor[:num_sequences] for tensor in tensors))


def prepare_decode_inputs(
    token_ids: Tensor, block_table: Tensor, lengths: Tensor, rows: Tensor, *, block_size: int, out: DecodeInputs
) -> None:
    """Fill `out` for the last known token of each of `rows` [S] int64, PADDING_ROW for padding. Changes `out`.

    `token_ids` [R, L] and `block_table` [R, max_blocks] are int32, `lengths` [R] int32 counts the known tokens of each row, at least
    one. Padding gets token 0 at position 0, no slot and no length. A sequence's blocks are copied up to that of its last token.
    """
    is_row = rows >= 0
    safe = rows.clamp(min=0)
    seq_lens = lengths[safe].masked_fill(~is_row, 0)
    positions = (seq_lens - 1).clamp(min=0).long()
    blocks = block_table[safe, positions // block_size].long()
    out.token_ids.copy_(token_ids[safe, positions].long().masked_fill(~is_row, 0))
    out.positions.copy_(positions)
    out.slot_mapping.copy_((blocks * block_size + positions % block_size).masked_fill(~is_row, PADDING_SLOT))
    out.seq_lens.copy_(seq_lens)
    is_used = torch.arange(block_table.shape[1], device=rows.device) < ((seq_lens + block_size - 1) // block_size)[:, None]
    out.block_tables.copy_(torch.where(is_used, block_table[safe], out.block_tables))


def write_sampled(sampled: Tensor, rows: Tensor, positions: Tensor, token_ids: Tensor, lengths: Tensor) -> None:
    """token_ids[row, position + 1] = sampled and lengths[row] = position + 2: the next step continues there. Changes both.

    `sampled`, `rows` and `positions` are [S] int64; PADDING_ROW and a position that is its row's last column write nothing.
    """
    is_written = (rows >= 0) & (positions + 1 < token_ids.shape[1])
    rows, positions = rows[is_written], positions[is_written]
    token_ids[rows, positions + 1] = sampled[is_written].to(torch.int32)
    lengths[rows] = (positions + 2).to(torch.int32)
