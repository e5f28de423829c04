"""Causal attention of any number of queries per sequence over paged keys and values, on the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedcore_kernels.triton_ops.attention_common import (
    NO_WINDOW,
    UNSEEN,
    ScoreScale,
    beside_cache,
    card_of,
    check_inputs,
    kernel_view,
    make_output,
    slot_offsets,
    softmax_step,
    widen,
    widen_early,
)
from pagedcore_kernels.triton_ops.attention_settings import PrefillConfig, PrefillShape, choose_prefill_config, num_query_tiles


def paged_attention_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    max_query_len: int,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    config: PrefillConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(cap(scale * q k^T) + causal mask) v for each sequence. Reference: `reference.attention.paged_attention`.

    `query` is [T, H, D], the caches [num_blocks, block_size, K, D] with equal strides and the queries' own keys already in
    them, `block_tables` [S, max_blocks] int32, `seq_lens` [S] int32 with the queries counted, `query_start_loc` [S + 1] int32.
    The queries of a sequence are its last tokens, at most `max_query_len`. Rows of `out` that no sequence names are left as
    they are: `query_start_loc` may begin above 0 and end below T. Stored keys and values count times `key_scale` and
    `value_scale`. Raises ValueError for shapes and layouts that do not fit.

    Nothing depends on device data but the kernel itself, so a graph may capture it. `query_start_loc`, `block_tables` and
    `seq_lens` are read before the kernels launched last have ended: see `launch.dependent_launch` for what may write them.
    """
    check_inputs(query, key_cache, value_cache, block_tables, seq_lens)
    scores = ScoreScale.of(scale, key_scale, soft_cap)
    result = make_output(query, out)
    num_tokens, num_heads, head_dim = query.shape
    num_sequences = seq_lens.shape[0]
    if num_tokens == 0 or num_sequences == 0:
        return result
    block_size, num_kv_heads = key_cache.shape[1:3]
    group_size = num_heads // num_kv_heads
    card = card_of(query.device)
    if config is None:
        config = choose_prefill_config(PrefillShape(group_size, head_dim, query.element_size(), max_query_len), card)
    tile_tokens = config.block_m // group_size
    _attend_queries[(num_query_tiles(num_tokens, num_sequences, max_query_len, tile_tokens), num_kv_heads)](
        query,
        kernel_view(key_cache),
        kernel_view(value_cache),
        block_tables,
        seq_lens,
        query_start_loc,
        result,
        scores.score_scale,
        scores.cap_scale,
        value_scale,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        block_tables.stride(0),
        *result.stride()[:2],
        num_sequences,
        NO_WINDOW if sliding_window is None else sliding_window,
        GROUP=group_size,
        TILE_TOKENS=tile_tokens,
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        HAS_CAP=scores.has_cap,
        HAS_WINDOW=sliding_window is not None,
        USE_PDL=card.has_dependent_launch,
        num_warps=config.num_warps,
        **({"launch_pdl": True} if card.has_dependent_launch else {}),
    )
    return result


@triton.jit
def _sequence_of_tile(query_start_loc_ptr, num_sequences, tile, TILE_TOKENS: tl.constexpr):
    """(sequence, its first token, its tokens, the tile's first token counted within it)."""
    base = tl.load(query_start_loc_ptr)
    num_started = 0
    for chunk in range(0, num_sequences, 128):
        sequences = chunk + tl.arange(0, 128)
        starts = tl.load(query_start_loc_ptr + sequences, mask=sequences < num_sequences, other=0) - base
        has_started = (starts // TILE_TOKENS + sequences <= tile) & (sequences < num_sequences)
        num_started += tl.sum(has_started.to(tl.int32), 0)
    sequence = num_started - 1
    start = tl.load(query_start_loc_ptr + sequence)
    num_queries = tl.load(query_start_loc_ptr + sequence + 1) - start
    return sequence, start, num_queries, (tile - (start - base) // TILE_TOKENS - sequence) * TILE_TOKENS


@triton.jit
def attend_tiles(
    query,
    values,
    sums,
    maxima,
    key_ptrs,
    value_ptrs,
    table_ptr,
    query_positions,
    begin,
    end,
    last_seen,
    window,
    score_scale,
    cap_scale,
    cache_stride_b,
    cache_stride_t,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """The running softmax over keys [begin, end); without mask where every query sees every one of them."""
    dims = tl.arange(0, HEAD_DIM_PAD)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        positions = start + tl.arange(0, BLOCK_N)
        if IS_MASKED:
            is_stored = positions <= last_seen
            if HAS_WINDOW:
                is_stored = is_stored & (positions > tl.min(query_positions, 0) - window)
            offsets = slot_offsets(table_ptr, positions, is_stored, cache_stride_b, cache_stride_t, BLOCK_SIZE)[:, None]
            mask = is_stored[:, None] & (dims[None, :] < HEAD_DIM)
        else:
            offsets = slot_offsets(table_ptr, positions, True, cache_stride_b, cache_stride_t, BLOCK_SIZE)[:, None]
            mask = dims[None, :] < HEAD_DIM
        key = tl.load(key_ptrs + offsets, mask=mask, other=0.0)
        value = tl.load(value_ptrs + offsets, mask=mask, other=0.0)
        if HEAD_DIM_PAD <= 128:
            key = widen_early(key, query.dtype)
        else:
            key = widen(key, query.dtype)  # early, wider heads would not fit the registers
        dots = tl.dot(query, tl.trans(key), input_precision="ieee")
        is_seen = positions[None, :] <= query_positions[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (positions[None, :] > query_positions[:, None] - window)
        weights, maxima, shrink = softmax_step(dots, is_seen, maxima, score_scale, cap_scale, HAS_CAP, IS_MASKED)
        sums = sums * shrink + tl.sum(weights, 1)
        values = values * shrink[:, None]
        values = tl.dot(weights.to(query.dtype), widen_early(value, query.dtype), values, input_precision="ieee")
    return values, sums, maxima


@triton.jit(
    do_not_specialize=["table_stride", "num_sequences", "window"],
    do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr", "query_start_loc_ptr"],
)
def _attend_queries(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    out_ptr,
    score_scale,
    cap_scale,
    value_scale,
    query_stride_t,
    query_stride_h,
    cache_stride_b,
    cache_stride_t,
    cache_stride_h,
    table_stride,
    out_stride_t,
    out_stride_h,
    num_sequences,
    window,
    GROUP: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One tile of query tokens with all query heads of one kv head. Later tiles, which see more keys, start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence, start, num_queries, first_token = _sequence_of_tile(query_start_loc_ptr, num_sequences, tile, TILE_TOKENS)
    seq_len = tl.load(seq_lens_ptr + sequence)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    if first_token >= num_queries:
        return
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM_PAD)
    tokens = first_token + rows // GROUP
    is_row = (rows < TILE_TOKENS * GROUP) & (tokens < num_queries)
    heads = kv_head * GROUP + rows % GROUP
    token_rows = (start + tokens).to(tl.int64)
    mask = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    query_offsets = (token_rows * query_stride_t + heads * query_stride_h)[:, None] + dims[None, :]
    query = tl.load(query_ptr + query_offsets, mask=mask, other=0.0)
    query = beside_cache(query, key_ptr.dtype.element_ty)
    key_ptrs = key_ptr + kv_head.to(tl.int64) * cache_stride_h + dims[None, :]
    value_ptrs = value_ptr + kv_head.to(tl.int64) * cache_stride_h + dims[None, :]
    table_ptr += sequence.to(tl.int64) * table_stride
    query_positions = seq_len - num_queries + tokens
    first_position = seq_len - num_queries + first_token
    last_position = tl.minimum(first_position + TILE_TOKENS, seq_len) - 1
    maxima = tl.full([BLOCK_M], UNSEEN, tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, HEAD_DIM_PAD], tl.float32)
    # Keys [seen_by_all, causal_edge) are seen by every query of the tile.
    seen_by_all = 0
    causal_edge = (first_position + 1) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
        seen_by_all = tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK_N) * BLOCK_N
        values, sums, maxima = attend_tiles(
            query, values, sums, maxima, key_ptrs, value_ptrs, table_ptr, query_positions,
            begin, tl.minimum(seen_by_all, last_position + 1), last_position, window, score_scale, cap_scale,
            cache_stride_b, cache_stride_t,
            HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, BLOCK_N, STAGES, HAS_CAP, HAS_WINDOW, True,
        )  # fmt: skip
    values, sums, maxima = attend_tiles(
        query, values, sums, maxima, key_ptrs, value_ptrs, table_ptr, query_positions,
        seen_by_all, causal_edge, last_position, window, score_scale, cap_scale,
        cache_stride_b, cache_stride_t,
        HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, BLOCK_N, STAGES, HAS_CAP, HAS_WINDOW, False,
    )  # fmt: skip
    values, sums, maxima = attend_tiles(
        query, values, sums, maxima, key_ptrs, value_ptrs, table_ptr, query_positions,
        tl.maximum(seen_by_all, causal_edge), last_position + 1, last_position, window, score_scale, cap_scale,
        cache_stride_b, cache_stride_t,
        HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, BLOCK_N, STAGES, HAS_CAP, HAS_WINDOW, True,
    )  # fmt: skip
    values = values * (value_scale / tl.maximum(sums, 1e-30))[:, None]
    out_offsets = (token_rows * out_stride_t + heads * out_stride_h)[:, None] + dims[None, :]
    tl.store(out_ptr + out_offsets, values.to(out_ptr.dtype.element_ty), mask=mask)
