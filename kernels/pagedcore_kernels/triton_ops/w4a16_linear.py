"""Products of 16-bit rows with 4-bit weights: read packed, expanded in registers, multiplied on the tensor cores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedcore_kernels.packed_w4 import TILE_ROWS, PackedW4
from pagedcore_kernels.triton_ops.attention_common import card_of
from pagedcore_kernels.triton_ops.dequantize_w4 import dequantize_w4, read_scale
from pagedcore_kernels.triton_ops.row_linear import make_product
from pagedcore_kernels.triton_ops.split_k import (
    SplitKWorkspace,
    launch_options,
    prefetch_to_l2,
    split_k_workspace,
    store_sum_of_splits,
)
from pagedcore_kernels.triton_ops.w4_settings import W4Config, choose_expansion, choose_w4_config

MAX_ROWS_OF_SUMS = 16
"""Up to here the zero point is taken from the sums of x, which the tensor cores give by the way; above, from each weight."""

MAX_ROWS = 64
"""Of one launch."""

MAX_PACKED_ROWS = 128
"""Above, the weights are expanded once and multiplied by torch: a matrix written and read costs less than more launches."""


def w4a16_linear(
    x: Tensor,
    packed: PackedW4,
    bias: Tensor | None = None,
    *,
    config: W4Config | None = None,
    workspace: SplitKWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`x @ W.T + bias`: [M, K] float16 or bfloat16 -> [M, N]; `out` if it is given.

    Up to 128 rows are multiplied with the packed weights, 64 at a time; they may be captured in a graph once one product ran outside
    of one on that device, and give the same bits for the same configuration. Raises ValueError for tensors that the kernel does not read.
    """
    _check(x, packed, bias)
    if x.shape[0] > MAX_PACKED_ROWS:
        product = F.linear(x, dequantize_w4(packed, x.dtype), bias)
        return product if out is None else make_product(x, packed.out_features, out).copy_(product)
    result = make_product(x, packed.out_features, out)
    card = card_of(x.device)
    space = workspace or split_k_workspace(x.device)
    for first in range(0, x.shape[0], MAX_ROWS):
        rows = x[first : first + MAX_ROWS]
        chosen = config or choose_w4_config(rows.shape[0], packed.out_features, packed.in_features, card)
        _launch(chosen, rows, packed, bias, result[first : first + MAX_ROWS], space, card.has_dependent_launch)
    return result


def _check(x: Tensor, packed: PackedW4, bias: Tensor | None) -> None:
    if x.dim() != 2 or x.shape[0] < 1 or x.shape[1] != packed.in_features or x.stride(1) != 1:
        raise ValueError(f"x must have the shape [rows, {packed.in_features}] and contiguous rows, it has {tuple(x.shape)}, {x.stride()}")
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x must be float16 or bfloat16 beside 4-bit weights, it is {x.dtype}")
    if bias is not None and (bias.shape != (packed.out_features,) or not bias.is_contiguous()):
        raise ValueError(f"the bias must be contiguous and have the shape [{packed.out_features}], it has {tuple(bias.shape)}")


def _launch(config: W4Config, x: Tensor, packed: PackedW4, bias: Tensor | None, out: Tensor, workspace: SplitKWorkspace, pdl: bool) -> None:
    num_rows = x.shape[0]
    splits = workspace.fitting(config.splits, num_rows, packed.out_features, config.block_n)
    expansion = choose_expansion(x.dtype, subtract=num_rows > MAX_ROWS_OF_SUMS)
    one_group = packed.scales.shape[0] == 1
    _w4_kernel[(triton.cdiv(packed.out_features, config.block_n), splits)](
        x,
        packed.words,
        packed.scales,
        packed.scales if bias is None else bias,
        out,
        workspace.partials,
        workspace.counters,
        num_rows,
        packed.out_features,
        packed.in_features,
        packed.num_blocks,
        packed.scales.shape[1],
        x.stride(0),
        BLOCK_M=8 if num_rows <= 16 else triton.next_power_of_2(num_rows),
        HALVES=2 if 8 < num_rows <= 16 else 1,
        BLOCK_N=config.block_n,
        SLICE=packed.slice_size,
        GROUP=0 if one_group else packed.group_size,
        ZERO=-1 if packed.uniform_zero is None else packed.uniform_zero,
        SUBTRACT=num_rows > MAX_ROWS_OF_SUMS,
        EVEN_K=packed.in_features == packed.num_blocks * 4 * packed.slice_size,
        SPLITS=splits,
        HAS_BIAS=bias is not None,
        PREFETCHED=config.prefetched_blocks if pdl else 0,
        NUM_STAGES=config.num_stages,
        PDL=pdl,
        TILE=TILE_ROWS,
        ASM=expansion.asm,
        OFFSETS=expansion.offsets,
        SCALES=expansion.scales,
        **launch_options(config.num_warps, pdl=pdl, max_registers=config.max_registers),
    )


@triton.jit
def _expand(words, addend, slice_index: tl.constexpr, asm: tl.constexpr, subtract: tl.constexpr) -> tl.tensor:
    """The codes of one slice, [BLOCK_N, SLICE], as numbers of `addend`'s type; see `Expansion`."""
    if asm is None:
        shift: tl.constexpr = 8 * (slice_index % 2) + 4 * (slice_index // 2)
        codes = ((words >> shift) & 15).to(addend.dtype)
        return codes + addend if subtract else codes
    elif subtract:
        return tl.inline_asm_elementwise(asm[slice_index], "=r,r,r", [words, addend], dtype=addend.dtype, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(asm[slice_index], "=r,r", [words], dtype=addend.dtype, is_pure=True, pack=2)


@triton.jit
def _add_block(
    sums,
    words,
    block,
    x_ptrs,
    in_rows,
    scale_ptrs,
    scale_stride_0,
    K,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    SUBTRACT: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    OFFSETS: tl.constexpr,
    SCALES: tl.constexpr,
) -> tl.tensor:
    """sums [BLOCK_N, BLOCK_M] plus the products of one block, words [BLOCK_N, SLICE], and the rows that `x_ptrs` [SLICE, BLOCK_M] begin."""
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    ones = tl.full(words.shape, 1.0, dtype)
    SLICES_PER_SCALE: tl.constexpr = 2 if GROUP % (2 * SLICE) == 0 else 1
    for slice_index in tl.static_range(0, 4, SLICES_PER_SCALE):
        start = (block * 4 + slice_index) * SLICE
        group = start // GROUP if GROUP > 0 else 0
        scale, zero = read_scale(scale_ptrs + group * scale_stride_0, ZERO)
        offset = tl.full(scale.shape, OFFSETS[slice_index], tl.float32) + zero
        addend = tl.broadcast_to((0.0 - offset).to(dtype)[:, None], words.shape)
        products = tl.zeros_like(sums)
        row_sums = tl.zeros_like(sums)
        for step in tl.static_range(SLICES_PER_SCALE):
            columns = start + step * SLICE
            if EVEN_K:
                x = tl.load(x_ptrs + columns, mask=in_rows[None, :], other=0.0)
            else:
                in_range = (columns + tl.arange(0, SLICE) < K)[:, None]
                x = tl.load(x_ptrs + columns, mask=in_rows[None, :] & in_range, other=0.0)
            products = tl.dot(_expand(words, addend, slice_index + step, ASM, SUBTRACT), x, products)
            if not SUBTRACT:
                row_sums = tl.dot(ones, x, row_sums)
        if SUBTRACT:
            sums += products * scale[:, None]
        else:
            sums += (products * SCALES[slice_index] - row_sums * offset[:, None]) * scale[:, None]
    return sums


@triton.jit(do_not_specialize=["M", "num_blocks"])
def _w4_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    K,
    num_blocks,
    scale_stride_0,
    x_stride_0,
    BLOCK_M: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    SUBTRACT: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PREFETCHED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
    TILE: tl.constexpr,
    ASM: tl.constexpr,
    OFFSETS: tl.constexpr,
    SCALES: tl.constexpr,
) -> None:
    """out[m, n] = sum over k of (code[n, k] - zero[n, g]) scale[n, g] x[m, k] + bias[n]; reference: reference/w4a16_linear.py.

    A step multiplies one block of 4 slices, words [BLOCK_N, SLICE] in the layout of `PackedW4`. Unless SUBTRACT, codes are multiplied
    as they are and `zero * sum of x` is taken off, the sum from a product with ones that arrives in the same registers.
    GROUP is the number of inputs of a group, 0 if all are of one. With HALVES = 2 each word is multiplied with two times BLOCK_M rows.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    words_of_row = tl.arange(0, SLICE)
    first = num_blocks * split // SPLITS
    last = num_blocks * (split + 1) // SPLITS
    row_ptrs = words_ptr + (outputs // TILE).to(tl.int64) * num_blocks * (TILE * SLICE) + (outputs % TILE) * SLICE
    word_ptrs = row_ptrs[:, None] + words_of_row[None, :]
    if PREFETCHED > 0:
        # 64 words of 2 bytes are one line of the cache.
        lines = tl.arange(0, BLOCK_N * SLICE // 64)
        tiles = (tile * BLOCK_N // TILE + lines // SLICE).to(tl.int64)
        line_ptrs = words_ptr + tiles * num_blocks * (TILE * SLICE) + lines % SLICE * 64
        for ahead in tl.static_range(PREFETCHED):
            prefetch_to_l2(line_ptrs + tl.minimum(first + ahead, num_blocks - 1) * (TILE * SLICE))
    bias = tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None] if HAS_BIAS else 0.0
    if PDL:
        if PREFETCHED > 0:
            gdc_launch_dependents()
        gdc_wait()
    x_ptrs = x_ptr + rows.to(tl.int64)[None, :] * x_stride_0 + words_of_row[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    more_sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in tl.range(first, last, num_stages=NUM_STAGES):
        words = tl.load(word_ptrs + block * (TILE * SLICE))
        scale_ptrs = scales_ptr + outputs
        sums = _add_block(
            sums, words, block, x_ptrs, rows < M, scale_ptrs, scale_stride_0, K, SLICE, GROUP, ZERO, SUBTRACT, EVEN_K, ASM, OFFSETS, SCALES
        )
        if HALVES == 2:
            x_ptrs_2 = x_ptrs + BLOCK_M * x_stride_0
            in_rows_2 = rows + BLOCK_M < M
            more_sums = _add_block(
                more_sums,
                words,
                block,
                x_ptrs_2,
                in_rows_2,
                scale_ptrs,
                scale_stride_0,
                K,
                SLICE,
                GROUP,
                ZERO,
                SUBTRACT,
                EVEN_K,
                ASM,
                OFFSETS,
                SCALES,
            )
    if PDL and PREFETCHED == 0:
        gdc_launch_dependents()
    if HALVES == 2:
        sums = tl.reshape(tl.permute(tl.join(sums, more_sums), (0, 2, 1)), (BLOCK_N, 2 * BLOCK_M))
    all_rows = tl.arange(0, HALVES * BLOCK_M)
    offsets = all_rows[None, :] * N + outputs[:, None]
    mask = (all_rows[None, :] < M) & (outputs[:, None] < N)
    store_sum_of_splits(sums, bias, offsets, mask, out_ptr, partials_ptr, counters_ptr, tile, split, M * N, SPLITS)
