"""Products of up to 16 rows with packed weights: the codes pass the tensor cores as they are, sums are scaled."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedcore_kernels.packed_weights import TILE_ROWS, PackedWeights
from pagedcore_kernels.triton_ops.code_expansion import expand_codes, expand_differences, expand_less_zero, expand_raw
from pagedcore_kernels.triton_ops.dequantize import read_scale
from pagedcore_kernels.triton_ops.packed_settings import FewRowsConfig
from pagedcore_kernels.triton_ops.split_k import SplitKWorkspace, launch_options, prefetch_to_l2, store_sum_of_splits

MAX_FEW_ROWS = 16


def multiply_few_rows(
    config: FewRowsConfig, x: Tensor, packed: PackedWeights, bias: Tensor | None, out: Tensor, workspace: SplitKWorkspace, *, pdl: bool
) -> None:
    """`out` = `x @ W.T + bias` for x of 1 to 16 rows."""
    num_rows = x.shape[0]
    block_n = config.block_n if packed.words.shape[0] * TILE_ROWS % config.block_n == 0 else TILE_ROWS
    wanted = min(config.splits, packed.num_blocks)  # each has a block at least: the kernel counts on it
    splits = workspace.fitting(wanted, num_rows, packed.out_features, block_n)
    expansion = expand_raw(x.dtype) if packed.bits == 4 else expand_less_zero(x.dtype)
    one_group = packed.scales.shape[0] == 1
    _few_rows_kernel[(triton.cdiv(packed.out_features, block_n), splits)](
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
        BLOCK_M=config.block_m,
        HALVES=2 if num_rows > config.block_m else 1,
        BLOCK_N=block_n,
        BITS=packed.bits,
        SLICE=packed.slice_size,
        GROUP=0 if one_group else packed.group_size,
        ZERO=-1 if packed.uniform_zero is None else packed.uniform_zero,
        EVEN_K=packed.in_features == packed.num_blocks * packed.block_size,
        SPLITS=splits,
        HAS_BIAS=bias is not None,
        PREFETCHED=config.prefetched_blocks if pdl else 0,
        NUM_STAGES=config.num_stages,
        PDL=pdl,
        TILE=TILE_ROWS,
        ASM=expansion.asm,
        CONSTRAINTS=expansion.constraints,
        OFFSETS=expansion.offsets,
        FACTORS=expansion.factors,
        **launch_options(config.num_warps, pdl=pdl, max_registers=config.max_registers),
    )


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
    BITS: tl.constexpr,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    OFFSETS: tl.constexpr,
    FACTORS: tl.constexpr,
) -> tl.tensor:
    """sums [BLOCK_N, BLOCK_M] plus the products of one block, words [BLOCK_N, SLICE], and the rows that `x_ptrs` [SLICE, BLOCK_M] begin."""
    ones = tl.full(words.shape, 1.0, x_ptrs.dtype.element_ty)
    SLICES: tl.constexpr = 16 // BITS
    SLICES_PER_SCALE: tl.constexpr = 2 if GROUP % (2 * SLICE) == 0 else 1
    for slice_index in tl.static_range(0, SLICES, SLICES_PER_SCALE):
        start = (block * SLICES + slice_index) * SLICE
        group = start // GROUP if GROUP > 0 else 0
        scale, zero = read_scale(scale_ptrs + group * scale_stride_0, ZERO)
        offset = zero + OFFSETS[slice_index]
        products = tl.zeros_like(sums)
        row_sums = tl.zeros_like(sums)
        for step in tl.static_range(SLICES_PER_SCALE):
            columns = start + step * SLICE
            if EVEN_K:
                x = tl.load(x_ptrs + columns, mask=in_rows[None, :], other=0.0)
            else:
                in_range = (columns + tl.arange(0, SLICE) < K)[:, None]
                x = tl.load(x_ptrs + columns, mask=in_rows[None, :] & in_range, other=0.0)
            if BITS == 4:
                products = tl.dot(expand_codes(words, x, slice_index + step, ASM, CONSTRAINTS), x, products)
                row_sums = tl.dot(ones, x, row_sums)
            else:
                differences = expand_differences(words, (0.0 - offset)[:, None], x, slice_index + step, ASM, CONSTRAINTS)
                products = tl.dot(differences, x, products)
        if BITS == 4:
            products -= row_sums * (offset * (1.0 / FACTORS[slice_index]))[:, None]
            scale *= FACTORS[slice_index]
        sums += products * scale[:, None]
    return sums


@triton.jit(do_not_specialize=["M", "num_blocks"])
def _few_rows_kernel(
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
    BITS: tl.constexpr,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PREFETCHED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
    TILE: tl.constexpr,
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    OFFSETS: tl.constexpr,
    FACTORS: tl.constexpr,
) -> None:
    """out[m, n] = sum over k of (code[n, k] - zero[n, g]) scale[n, g] x[m, k] + bias[n]; reference: reference/packed_linear.py.

    A step multiplies one block, words [BLOCK_N, SLICE] in the layout of `PackedWeights`. 4-bit codes are multiplied as they are and
    `zero * sum of x` is taken off, the sum from a product with ones that arrives in the same registers; 8-bit codes lose their zero
    point before. GROUP is the number of inputs of a group, 0 if all are of one. With HALVES = 2 each word is multiplied with two
    times BLOCK_M rows.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    words_of_row = tl.arange(0, SLICE)
    first = num_blocks * split // SPLITS
    last = num_blocks * (split + 1) // SPLITS
    tl.assume(first < last)  # else a way past the loop makes the assembler wait for each product on the tensor cores
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
            sums, words, block, x_ptrs, rows < M, scale_ptrs, scale_stride_0, K,
            BITS, SLICE, GROUP, ZERO, EVEN_K, ASM, CONSTRAINTS, OFFSETS, FACTORS,
        )  # fmt: skip
        if HALVES == 2:
            x_ptrs_2 = x_ptrs + BLOCK_M * x_stride_0
            more_sums = _add_block(
                more_sums, words, block, x_ptrs_2, rows + BLOCK_M < M, scale_ptrs, scale_stride_0, K,
                BITS, SLICE, GROUP, ZERO, EVEN_K, ASM, CONSTRAINTS, OFFSETS, FACTORS,
            )  # fmt: skip
    if PDL and PREFETCHED == 0:
        gdc_launch_dependents()
    if HALVES == 2:
        sums = tl.reshape(tl.permute(tl.join(sums, more_sums), (0, 2, 1)), (BLOCK_N, 2 * BLOCK_M))
    all_rows = tl.arange(0, HALVES * BLOCK_M)
    offsets = all_rows[None, :] * N + outputs[:, None]
    mask = (all_rows[None, :] < M) & (outputs[:, None] < N)
    store_sum_of_splits(sums, bias, offsets, mask, out_ptr, partials_ptr, counters_ptr, tile, split, M * N, SPLITS)
