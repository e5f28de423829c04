"""Packed weights written out as a plain matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedcore_kernels.packed_weights import TILE_ROWS, PackedWeights


def dequantize(packed: PackedWeights, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """W [N, K] of `dtype`, computed in float32 and rounded once; `out` if it is given."""
    shape = (packed.out_features, packed.in_features)
    if out is not None and (out.shape != shape or out.dtype != dtype or not out.is_contiguous()):
        raise ValueError(f"out must be contiguous, {dtype} and {list(shape)}; it is {out.dtype} and {tuple(out.shape)}")
    weight = torch.empty(shape, dtype=dtype, device=packed.words.device) if out is None else out
    _dequantize_kernel[(packed.num_blocks, packed.words.shape[0])](
        packed.words,
        packed.scales,
        weight,
        *shape,
        packed.scales.shape[1],
        BITS=packed.bits,
        SLICE=packed.slice_size,
        GROUP=0 if packed.scales.shape[0] == 1 else packed.group_size,
        ZERO=-1 if packed.uniform_zero is None else packed.uniform_zero,
        TILE=TILE_ROWS,
    )
    return weight


@triton.jit
def read_scale(scale_ptrs, ZERO: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """scale [BLOCK_N] and zero point, which stands in the scale's low 8 bits unless it is the constant ZERO."""
    return split_scale(tl.load(scale_ptrs), ZERO)


@triton.jit
def split_scale(scale, ZERO: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The scale and zero point of what is stored as a scale, both float32."""
    if ZERO >= 0:
        return scale, tl.zeros_like(scale) + ZERO
    else:
        bits = scale.to(tl.int32, bitcast=True)
        return (bits & -256).to(tl.float32, bitcast=True), (bits & 255).to(tl.float32)


@triton.jit
def codes_of_slice(words, slice_index: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """The codes of one slice, int16."""
    shift: tl.constexpr = 8 * (slice_index % 2) + 4 * (slice_index // 2)
    return (words >> shift) & (2**BITS - 1)


@triton.jit
def _dequantize_kernel(
    words_ptr,
    scales_ptr,
    out_ptr,
    N,
    K,
    scale_stride_0,
    BITS: tl.constexpr,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """out[n, k] = (code[n, k] - zero[n, g]) scale[n, g]; a program writes one tile of `PackedWeights`. See reference/packed_linear.py."""
    block = tl.program_id(0)
    tile = tl.program_id(1)
    rows = tl.arange(0, TILE)
    words_of_row = tl.arange(0, SLICE)
    outputs = tile * TILE + rows
    tile_ptr = words_ptr + (tile.to(tl.int64) * tl.num_programs(0) + block) * (TILE * SLICE)
    words = tl.load(tile_ptr + rows[:, None] * SLICE + words_of_row[None, :])
    for slice_index in tl.static_range(16 // BITS):
        start = (block * (16 // BITS) + slice_index) * SLICE
        columns = start + words_of_row
        group = start // GROUP if GROUP > 0 else 0
        scale, zero = read_scale(scales_ptr + group * scale_stride_0 + outputs, ZERO)
        codes = codes_of_slice(words, slice_index, BITS)
        weights = (codes.to(tl.float32) - zero[:, None]) * scale[:, None]
        out_ptrs = out_ptr + outputs.to(tl.int64)[:, None] * K + columns[None, :]
        tl.store(out_ptrs, weights.to(out_ptr.dtype.element_ty), mask=(outputs < N)[:, None] & (columns < K)[None, :])
