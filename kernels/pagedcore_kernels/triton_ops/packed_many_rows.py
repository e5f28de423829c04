"""Products of more than 16 rows with packed weights: whole weights are made in registers, the tensor cores' left operand."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedcore_kernels.packed_weights import TILE_ROWS, PackedWeights
from pagedcore_kernels.triton_ops.code_expansion import expand_scaled, expand_weights
from pagedcore_kernels.triton_ops.packed_settings import ManyRowsConfig
from pagedcore_kernels.triton_ops.split_k import SplitKWorkspace, launch_options, prefetch_to_l2, store_sum_of_splits


def multiply_many_rows(
    config: ManyRowsConfig, x: Tensor, packed: PackedWeights, bias: Tensor | None, out: Tensor, workspace: SplitKWorkspace, *, pdl: bool
) -> None:
    """`out` = `x @ W.T + bias` for x of any number of rows; each `block_m` of them read the weights anew."""
    num_rows = x.shape[0]
    padded_outputs = packed.words.shape[0] * TILE_ROWS
    block_n = config.block_n if padded_outputs % config.block_n == 0 else TILE_ROWS
    row_tiles = triton.cdiv(num_rows, config.block_m)
    wanted = min(config.splits, packed.num_blocks)  # each has a block at least: the kernel counts on it
    splits = workspace.fitting(wanted, num_rows, packed.out_features, block_n, row_tiles=row_tiles)
    expansion = expand_scaled(x.dtype, packed.bits)
    one_group = packed.scales.shape[0] == 1
    _many_rows_kernel[(row_tiles, triton.cdiv(packed.out_features, block_n), splits)](
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
        BLOCK_N=block_n,
        STEP=min(config.step, packed.slice_size),
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
        **launch_options(config.num_warps, pdl=pdl, max_registers=config.max_registers),
    )


@triton.jit(do_not_specialize=["M", "num_blocks"])
def _many_rows_kernel(
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
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
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
) -> None:
    """out[m, n] = sum over k of (code[n, k] - zero[n, g]) scale[n, g] x[m, k] + bias[n]; reference: reference/packed_linear.py.

    A step takes STEP words of each output, and with them as many inputs of every slice of a block. GROUP is the number of inputs of a
    group, 0 if all are of one. Programs that read the same weights for other rows stand next to each other.
    """
    row_tile = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    SLICES: tl.constexpr = 16 // BITS
    STEPS: tl.constexpr = SLICE // STEP
    SLICES_PER_SCALE: tl.constexpr = 2 if GROUP % (2 * SLICE) == 0 else 1
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    words_of_step = tl.arange(0, STEP)
    first = num_blocks * split // SPLITS * STEPS
    last = num_blocks * (split + 1) // SPLITS * STEPS
    tl.assume(first < last)  # else a way past the loop makes the assembler wait for each product on the tensor cores
    row_ptrs = words_ptr + (outputs // TILE).to(tl.int64) * num_blocks * (TILE * SLICE) + (outputs % TILE) * SLICE
    word_ptrs = row_ptrs[:, None] + words_of_step[None, :]
    if PREFETCHED > 0:
        # 64 words of 2 bytes are one line of the cache.
        lines = tl.arange(0, BLOCK_N * SLICE // 64)
        tiles = (tile * BLOCK_N // TILE + lines // SLICE).to(tl.int64)
        line_ptrs = words_ptr + tiles * num_blocks * (TILE * SLICE) + lines % SLICE * 64
        for ahead in tl.static_range(PREFETCHED):
            prefetch_to_l2(line_ptrs + tl.minimum(first // STEPS + ahead, num_blocks - 1) * (TILE * SLICE))
    bias = tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None] if HAS_BIAS else 0.0
    if PDL:
        if PREFETCHED > 0:
            gdc_launch_dependents()
        gdc_wait()
    # Rows past M read others again, and their sums are not stored. Each another one: if all read the last, they would wait for its lines.
    x_ptrs = x_ptr + (rows % M).to(tl.int64)[None, :] * x_stride_0 + words_of_step[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(first, last, num_stages=NUM_STAGES):
        block = step // STEPS
        within = step % STEPS * STEP
        words = tl.load(word_ptrs + block * (TILE * SLICE) + within)
        for slice_index in tl.static_range(0, SLICES, SLICES_PER_SCALE):
            start = (block * SLICES + slice_index) * SLICE
            group = start // GROUP if GROUP > 0 else 0
            scale = tl.load(scales_ptr + group * scale_stride_0 + outputs)
            for ahead in tl.static_range(SLICES_PER_SCALE):
                columns = start + ahead * SLICE + within
                if EVEN_K:
                    x = tl.load(x_ptrs + columns)
                else:
                    x = tl.load(x_ptrs + columns, mask=(columns + words_of_step < K)[:, None], other=0.0)
                weights = expand_weights(words, scale[:, None], x, slice_index + ahead, BITS, ZERO, ASM, CONSTRAINTS, OFFSETS)
                sums = tl.dot(weights, x, sums)
    if PDL and PREFETCHED == 0:
        gdc_launch_dependents()
    offsets = rows[None, :] * N + outputs[:, None]
    mask = (rows[None, :] < M) & (outputs[:, None] < N)
    counter = tile * tl.num_programs(0) + row_tile
    store_sum_of_splits(sums, bias, offsets, mask, out_ptr, partials_ptr, counters_ptr, counter, split, M * N, SPLITS)
