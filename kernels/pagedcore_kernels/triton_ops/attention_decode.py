"""Attention of one query per sequence over paged keys and values: split over the context, then merged."""

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
    check_places,
    kernel_view,
    make_output,
    places_of,
    prefetch_lines,
    slot_offsets,
    softmax_step,
    widen,
    widen_early,
)
from pagedcore_kernels.triton_ops.attention_parts import Parts, merge_parts, share_of_keys
from pagedcore_kernels.triton_ops.attention_settings import MIN_DOT_ROWS, SHARE_UNIT, DecodeConfig, DecodeShape, choose_decode_config

LINE_BYTES = 128
"""What one prefetch asks for."""


def paged_attention_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_seq_len: int,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    config: DecodeConfig | None = None,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    out_places: Tensor | None = None,
) -> Tensor:
    """softmax(cap(scale * q k^T)) v, one query a sequence: its last token. Reference: `reference.attention.paged_attention`.

    `query` is [S, H, D], the caches [num_blocks, block_size, K, D] with equal strides, `block_tables` [S, max_blocks] int32,
    `seq_lens` [S] int32, none above `max_seq_len`. A sequence of length 0 gets zeros and reads nothing. Stored keys and
    values count times `key_scale` and `value_scale` (8-bit caches). `workspace` is float32 of at least
    `decode_workspace_size(...)` elements, whatever they hold; one is made where none is given. With `out_places`
    [H * D] int32, a permutation, element e of a sequence's heads, one after another, is stored as element out_places[e] of them.
    Raises ValueError for shapes and layouts that do not fit.

    Nothing depends on device data but the kernels themselves, so a graph may capture it. `block_tables` and `seq_lens`
    are read before the kernels launched last have ended: see `launch.dependent_launch` for what may write them.
    """
    check_inputs(query, key_cache, value_cache, block_tables, seq_lens)
    scores = ScoreScale.of(scale, key_scale, soft_cap)
    result = make_output(query, out)
    check_places(result, out_places)
    if query.shape[0] == 0:
        return result
    if config is None:
        config = choose_config(query, key_cache, max_seq_len, sliding_window)
    parts = Parts.within(query, config.num_splits, workspace)
    window = NO_WINDOW if sliding_window is None else sliding_window
    attend_splits(
        query, key_cache, value_cache, block_tables, seq_lens, None, result, out_places, parts, scores, value_scale, window, config
    )
    if parts.num_parts > 1:
        merge_parts(parts, seq_lens, window, None, result, out_places)
    return result


def choose_config(query: Tensor, key_cache: Tensor, max_seq_len: int, sliding_window: int | None) -> DecodeConfig:
    """Settings for contexts of up to `max_seq_len` keys on the query's card."""
    num_sequences, num_heads, head_dim = query.shape
    longest = max_seq_len if sliding_window is None else min(max_seq_len, sliding_window)
    element_bytes = max(query.element_size(), key_cache.element_size())  # values of 8 bits lie in shared memory widened, too
    shape = DecodeShape(num_sequences, num_heads, key_cache.shape[2], head_dim, element_bytes, longest)
    return choose_decode_config(shape, card_of(query.device))


def attend_splits(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    prefix_lens: Tensor | None,
    result: Tensor,
    out_places: Tensor | None,
    parts: Parts,
    scores: ScoreScale,
    value_scale: float,
    window: int,
    config: DecodeConfig,
) -> None:
    """Changes `result` where there is one part, else the parts of the splits. A sequence's first `prefix_lens` keys are left out."""
    num_sequences, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group_size = num_heads // num_kv_heads
    head_dim_pad = triton.next_power_of_2(head_dim)
    uses_pdl = card_of(query.device).has_dependent_launch
    _attend_split[(num_kv_heads, config.num_splits, num_sequences)](
        query,
        kernel_view(key_cache),
        kernel_view(value_cache),
        block_tables,
        seq_lens,
        seq_lens if prefix_lens is None else prefix_lens,
        result,
        seq_lens if out_places is None else out_places,
        parts.values,
        parts.log_sums,
        scores.score_scale,
        scores.cap_scale,
        value_scale,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        block_tables.stride(0),
        *result.stride()[:2],
        config.num_splits,
        parts.num_prefix_parts,
        window,
        GROUP=group_size,
        GROUP_PAD=max(MIN_DOT_ROWS, triton.next_power_of_2(group_size)),
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=head_dim_pad,
        BLOCK_SIZE=block_size,
        BLOCK_N=config.block_n,
        SHARE_UNIT=SHARE_UNIT,
        STAGES=config.num_stages,
        HAS_CAP=scores.has_cap,
        HAS_PREFIX=prefix_lens is not None,
        HAS_PLACES=out_places is not None and parts.num_parts == 1,
        IS_SPLIT=parts.num_parts > 1,
        USE_PDL=uses_pdl,
        PREFETCHED_LINES=max(1, head_dim_pad * key_cache.element_size() // LINE_BYTES) if uses_pdl and config.prefetch else 0,
        num_warps=config.num_warps,
        **({"launch_pdl": True} if uses_pdl else {}),
    )


@triton.jit(
    do_not_specialize=["table_stride", "num_splits", "num_prefix_parts", "window"],
    do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr", "prefix_lens_ptr", "places_ptr"],
)
def _attend_split(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    seq_lens_ptr,
    prefix_lens_ptr,
    out_ptr,
    places_ptr,
    partial_ptr,
    log_sum_ptr,
    score_scale,
    cap_scale,
    value_scale,
    query_stride_s,
    query_stride_h,
    cache_stride_b,
    cache_stride_t,
    cache_stride_h,
    table_stride,
    out_stride_s,
    out_stride_h,
    num_splits,
    num_prefix_parts,
    window,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARE_UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    USE_PDL: tl.constexpr,
    PREFETCHED_LINES: tl.constexpr,
):
    """One kv head's group of query heads over one split of one sequence, with a running softmax in base 2."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + sequence)
    table_ptr += sequence * table_stride
    if HAS_PREFIX:
        prefix_len = tl.load(prefix_lens_ptr + sequence)
        seq_len -= prefix_len
        table_ptr += prefix_len // BLOCK_SIZE
    first_seen = tl.maximum(seq_len - window, 0)
    share = share_of_keys(seq_len - first_seen, num_splits, SHARE_UNIT)
    first = first_seen + split * share
    last = tl.minimum(first + share, seq_len)
    dims = tl.arange(0, HEAD_DIM_PAD)
    key_ptr += kv_head.to(tl.int64) * cache_stride_h
    value_ptr += kv_head.to(tl.int64) * cache_stride_h
    if PREFETCHED_LINES > 0 and first < last:
        # Into the L2 cache only: a slot that the kernel before still writes is not read here.
        positions = first + tl.arange(0, BLOCK_N)
        offsets = slot_offsets(table_ptr, positions, positions < last, cache_stride_b, cache_stride_t, BLOCK_SIZE)
        lines = offsets[:, None] + (tl.arange(0, PREFETCHED_LINES) * (HEAD_DIM_PAD // PREFETCHED_LINES))[None, :]
        prefetch_lines(key_ptr + lines)
        prefetch_lines(value_ptr + lines)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    if IS_SPLIT and first >= last:
        return
    rows = tl.arange(0, GROUP_PAD)
    is_row = rows[:, None] < GROUP
    is_dim = dims[None, :] < HEAD_DIM
    heads = kv_head * GROUP + rows
    query_offsets = sequence * query_stride_s + heads[:, None] * query_stride_h + dims[None, :]
    query = tl.load(query_ptr + query_offsets, mask=is_row & is_dim, other=0.0)
    query = beside_cache(query, key_ptr.dtype.element_ty)
    key_ptrs = key_ptr + dims[None, :]
    value_ptrs = value_ptr + dims[None, :]
    maxima = tl.full([GROUP_PAD], UNSEEN, tl.float32)
    sums = tl.zeros([GROUP_PAD], tl.float32)
    values = tl.zeros([GROUP_PAD, HEAD_DIM_PAD], tl.float32)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        positions = start + tl.arange(0, BLOCK_N)
        is_seen = positions < last
        offsets = slot_offsets(table_ptr, positions, is_seen, cache_stride_b, cache_stride_t, BLOCK_SIZE)[:, None]
        key = tl.load(key_ptrs + offsets, mask=is_seen[:, None] & is_dim, other=0.0)
        value = tl.load(value_ptrs + offsets, mask=is_seen[:, None] & is_dim, other=0.0)
        dots = tl.dot(query, tl.trans(widen(key, query.dtype)), input_precision="ieee")
        weights, maxima, shrink = softmax_step(dots, is_seen[None, :], maxima, score_scale, cap_scale, HAS_CAP, True)
        sums = sums * shrink + tl.sum(weights, 1)
        values = values * shrink[:, None]
        values = tl.dot(weights.to(query.dtype), widen_early(value, query.dtype), values, input_precision="ieee")
    values = values * (value_scale / tl.maximum(sums, 1e-30))[:, None]
    if IS_SPLIT:
        parts = (sequence * tl.num_programs(0) * GROUP + heads) * (num_prefix_parts + num_splits) + num_prefix_parts + split
        tl.store(partial_ptr + parts[:, None] * HEAD_DIM + dims[None, :], values, mask=is_row & is_dim)
        tl.store(log_sum_ptr + parts, maxima + tl.log2(sums), mask=rows < GROUP)
    else:
        places = places_of(places_ptr, heads[:, None] * out_stride_h + dims[None, :], is_row & is_dim, HAS_PLACES)
        tl.store(out_ptr + sequence * out_stride_s + places, values.to(out_ptr.dtype.element_ty), mask=is_row & is_dim)
