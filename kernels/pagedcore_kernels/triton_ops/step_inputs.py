"""Inputs of a step in which every row advances by one token, from the rows' own buffers: one launch before, one after."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedcore_kernels.reference.step_inputs import DecodeInputs
from pagedcore_kernels.triton_ops.launch import dependent_launch

TABLE_BLOCK = 512
SEQUENCE_BLOCK = 128


def prepare_decode_inputs(
    token_ids: Tensor, block_table: Tensor, lengths: Tensor, rows: Tensor, *, block_size: int, out: DecodeInputs
) -> None:
    """Fill `out` for the last known token of each of `rows`; reference: `reference.step_inputs.prepare_decode_inputs`.

    A row without known tokens counts as padding. Raises ValueError for shapes, dtypes and layouts that do not fit.
    """
    max_blocks = block_table.shape[1]
    if out.block_tables.shape != (rows.shape[0], max_blocks) or out.block_tables.stride(1) != 1:
        expected = (rows.shape[0], max_blocks)
        raise ValueError(f"out.block_tables is {tuple(out.block_tables.shape)}; it must be {expected}, its rows contiguous.")
    _check_rows(rows, token_ids, lengths)
    if block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError("block_table must be int32, its rows contiguous.")
    if rows.shape[0] == 0:
        return
    _prepare_kernel[(rows.shape[0], triton.cdiv(max_blocks, TABLE_BLOCK))](
        token_ids,
        block_table,
        lengths,
        rows,
        out.token_ids,
        out.positions,
        out.slot_mapping,
        out.seq_lens,
        out.block_tables,
        max_blocks,
        token_ids.stride(0),
        block_table.stride(0),
        out.block_tables.stride(0),
        BLOCK_SIZE=block_size,
        TABLE_BLOCK=TABLE_BLOCK,
        num_warps=4,
        **dependent_launch(rows),
    )


def write_sampled(sampled: Tensor, rows: Tensor, positions: Tensor, token_ids: Tensor, lengths: Tensor) -> None:
    """token_ids[row, position + 1] = sampled, lengths[row] = position + 2; reference: `reference.step_inputs.write_sampled`."""
    _check_rows(rows, token_ids, lengths)
    if not all(x.shape == rows.shape and x.dtype == torch.int64 and x.is_contiguous() for x in (sampled, positions)):
        raise ValueError(f"sampled and positions must be contiguous int64, one for each of {rows.shape[0]} rows.")
    if rows.shape[0] == 0:
        return
    _write_sampled_kernel[(triton.cdiv(rows.shape[0], SEQUENCE_BLOCK),)](
        sampled,
        rows,
        positions,
        token_ids,
        lengths,
        rows.shape[0],
        token_ids.shape[1],
        token_ids.stride(0),
        BLOCK=SEQUENCE_BLOCK,
        num_warps=4,
        **dependent_launch(rows),
    )


def _check_rows(rows: Tensor, token_ids: Tensor, lengths: Tensor) -> None:
    if rows.dtype != torch.int64 or not rows.is_contiguous():
        raise ValueError(f"rows must be contiguous int64, not {rows.dtype}.")
    if token_ids.dtype != torch.int32 or lengths.dtype != torch.int32 or token_ids.stride(1) != 1 or not lengths.is_contiguous():
        raise ValueError("token_ids and lengths must be int32, their rows contiguous.")


@triton.jit
def _prepare_kernel(
    token_ids_ptr,
    block_table_ptr,
    lengths_ptr,
    rows_ptr,
    out_token_ids_ptr,
    out_positions_ptr,
    out_slots_ptr,
    out_seq_lens_ptr,
    out_tables_ptr,
    max_blocks,
    token_stride,
    table_stride,
    out_table_stride,
    BLOCK_SIZE: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One sequence and TABLE_BLOCK of its blocks a program; the first program of a sequence writes what it has one of."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sequence = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + sequence)
    is_row = row >= 0
    seq_len = tl.load(lengths_ptr + row, mask=is_row, other=0)
    num_blocks = tl.minimum((seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE, max_blocks)
    block = tl.program_id(1) * TABLE_BLOCK + tl.arange(0, TABLE_BLOCK)
    is_used = block < num_blocks
    ids = tl.load(block_table_ptr + row * table_stride + block, mask=is_used, other=0)
    tl.store(out_tables_ptr + sequence * out_table_stride + block, ids, mask=is_used)
    if tl.program_id(1) == 0:
        is_known = seq_len > 0
        position = tl.maximum(seq_len - 1, 0).to(tl.int64)
        token = tl.load(token_ids_ptr + row * token_stride + position, mask=is_known, other=0)
        has_block = is_known & (position // BLOCK_SIZE < max_blocks)
        last_block = tl.load(block_table_ptr + row * table_stride + position // BLOCK_SIZE, mask=has_block, other=0).to(tl.int64)
        slot = tl.where(has_block, last_block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(out_token_ids_ptr + sequence, token.to(tl.int64))
        tl.store(out_positions_ptr + sequence, position)
        tl.store(out_slots_ptr + sequence, slot)
        tl.store(out_seq_lens_ptr + sequence, seq_len)


@triton.jit
def _write_sampled_kernel(
    sampled_ptr,
    rows_ptr,
    positions_ptr,
    token_ids_ptr,
    lengths_ptr,
    num_sequences,
    num_columns,
    token_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sequence = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = sequence < num_sequences
    row = tl.load(rows_ptr + sequence, mask=inside, other=-1)
    column = tl.load(positions_ptr + sequence, mask=inside, other=0) + 1
    is_written = (row >= 0) & (column < num_columns)
    token = tl.load(sampled_ptr + sequence, mask=is_written, other=0)
    tl.store(token_ids_ptr + row * token_stride + column, token.to(tl.int32), mask=is_written)
    tl.store(lengths_ptr + row, (column + 1).to(tl.int32), mask=is_written)
