"""Decode attention of sequences that begin with the same keys: those are read once for all queries, what follows as always."""

from __future__ import annotations

import torch
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
)
from pagedcore_kernels.triton_ops.attention_decode import attend_splits, choose_config
from pagedcore_kernels.triton_ops.attention_parts import Parts, merge_parts, share_of_keys
from pagedcore_kernels.triton_ops.attention_prefill import attend_tiles
from pagedcore_kernels.triton_ops.attention_settings import SHARE_UNIT, PrefillShape, PrefixConfig, choose_prefix_config


def paged_attention_decode_shared(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    prefix_table: Tensor,
    prefix_lens: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_prefix_len: int,
    max_seq_len: int,
    soft_cap: float | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    config: PrefixConfig | None = None,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    out_places: Tensor | None = None,
) -> Tensor:
    """As `paged_attention_decode` and with the same result; the first `prefix_lens` [S] int32 keys of the sequences are read once.

    Those are the keys of `prefix_table` [max_blocks] int32: sequences that begin with them have the same length there, all
    others and padding have 0. A prefix ends with a block and before its sequences do. On the device it may be anything from 0
    to `max_prefix_len` keys, so one graph serves them all; what follows it is split as contexts of `max_seq_len` keys are.
    `workspace` is float32 of at least `decode_workspace_size` of the parts of prefix and splits together; one is made where
    none is given. Raises ValueError for shapes and layouts that do not fit.

    `prefix_lens` and `prefix_table`, too, are read before the kernels launched last have ended.
    """
    check_inputs(query, key_cache, value_cache, block_tables, seq_lens)
    _check_prefix(prefix_table, prefix_lens, seq_lens)
    scores = ScoreScale.of(scale, key_scale, soft_cap)
    result = make_output(query, out)
    check_places(result, out_places)
    num_sequences, num_heads, head_dim = query.shape
    if num_sequences == 0:
        return result
    if config is None:
        num_kv_heads = key_cache.shape[2]
        shape = PrefillShape(num_heads // num_kv_heads, head_dim, query.element_size(), num_sequences)
        config = choose_prefix_config(shape, num_kv_heads, max_prefix_len, card_of(query.device))
    splits = choose_config(query, key_cache, max_seq_len, None)
    parts = Parts.within(query, splits.num_splits, workspace, config.num_parts)
    _attend_prefix_parts(query, key_cache, value_cache, prefix_table, prefix_lens, parts, scores, value_scale, config)
    paged = (query, key_cache, value_cache, block_tables, seq_lens)
    attend_splits(*paged, prefix_lens, result, out_places, parts, scores, value_scale, NO_WINDOW, splits)
    merge_parts(parts, seq_lens, NO_WINDOW, prefix_lens, result, out_places)
    return result


def _check_prefix(prefix_table: Tensor, prefix_lens: Tensor, seq_lens: Tensor) -> None:
    if not all(x.dtype == torch.int32 and x.is_contiguous() for x in (prefix_table, prefix_lens)) or prefix_lens.shape != seq_lens.shape:
        raise ValueError(f"prefix_table and prefix_lens must be contiguous int32, prefix_lens one for each of {len(seq_lens)} sequences.")


def _attend_prefix_parts(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    prefix_table: Tensor,
    prefix_lens: Tensor,
    parts: Parts,
    scores: ScoreScale,
    value_scale: float,
    config: PrefixConfig,
) -> None:
    """Changes the prefix's parts."""
    num_sequences, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group_size = num_heads // num_kv_heads
    tile = config.tile
    uses_pdl = card_of(query.device).has_dependent_launch
    _attend_prefix[(triton.cdiv(num_sequences, tile.block_m // group_size), num_kv_heads, config.num_parts)](
        query,
        kernel_view(key_cache),
        kernel_view(value_cache),
        prefix_table,
        prefix_lens,
        parts.values,
        parts.log_sums,
        scores.score_scale,
        scores.cap_scale,
        value_scale,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        num_sequences,
        parts.num_parts,
        GROUP=group_size,
        TILE_TOKENS=tile.block_m // group_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        SHARE_UNIT=SHARE_UNIT,
        STAGES=tile.num_stages,
        HAS_CAP=scores.has_cap,
        USE_PDL=uses_pdl,
        num_warps=tile.num_warps,
        **({"launch_pdl": True} if uses_pdl else {}),
    )


@triton.jit(
    do_not_specialize=["num_sequences", "num_parts"],
    do_not_specialize_on_alignment=["table_ptr", "prefix_lens_ptr", "log_sum_ptr"],
)
def _attend_prefix(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    prefix_lens_ptr,
    part_value_ptr,
    log_sum_ptr,
    score_scale,
    cap_scale,
    value_scale,
    query_stride_s,
    query_stride_h,
    cache_stride_b,
    cache_stride_t,
    cache_stride_h,
    num_sequences,
    num_parts,
    GROUP: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARE_UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One tile of sequences with all query heads of one kv head, over one part of the prefix: every query sees every key.

    Sequences that do not begin with the prefix leave parts that nobody reads.
    """
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    rows = tl.arange(0, BLOCK_M)
    sequences = tl.program_id(0).to(tl.int64) * TILE_TOKENS + rows // GROUP
    is_row = (rows < TILE_TOKENS * GROUP) & (sequences < num_sequences)
    prefix_len = tl.max(tl.load(prefix_lens_ptr + sequences, mask=is_row, other=0), 0)
    share = share_of_keys(prefix_len, tl.num_programs(2), SHARE_UNIT)
    first = part * share
    last = tl.minimum(first + share, prefix_len)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    if first >= last:
        return
    dims = tl.arange(0, HEAD_DIM_PAD)
    heads = kv_head * GROUP + rows % GROUP
    mask = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    query_offsets = (sequences * query_stride_s + heads * query_stride_h)[:, None] + dims[None, :]
    query = tl.load(query_ptr + query_offsets, mask=mask, other=0.0)
    query = beside_cache(query, key_ptr.dtype.element_ty)
    key_ptrs = key_ptr + kv_head.to(tl.int64) * cache_stride_h + dims[None, :]
    value_ptrs = value_ptr + kv_head.to(tl.int64) * cache_stride_h + dims[None, :]
    maxima = tl.full([BLOCK_M], UNSEEN, tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, HEAD_DIM_PAD], tl.float32)
    last_seen = tl.zeros([BLOCK_M], tl.int32) + (last - 1)
    whole_tiles = first + (last - first) // BLOCK_N * BLOCK_N
    values, sums, maxima = attend_tiles(
        query, values, sums, maxima, key_ptrs, value_ptrs, table_ptr, last_seen,
        first, whole_tiles, last - 1, 0, score_scale, cap_scale, cache_stride_b, cache_stride_t,
        HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, BLOCK_N, STAGES, HAS_CAP, False, False,
    )  # fmt: skip
    values, sums, maxima = attend_tiles(
        query, values, sums, maxima, key_ptrs, value_ptrs, table_ptr, last_seen,
        whole_tiles, last, last - 1, 0, score_scale, cap_scale, cache_stride_b, cache_stride_t,
        HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, BLOCK_N, STAGES, HAS_CAP, False, True,
    )  # fmt: skip
    slots = (sequences * tl.num_programs(1) * GROUP + heads) * num_parts + part
    tl.store(part_value_ptr + slots[:, None] * HEAD_DIM + dims[None, :], values * (value_scale / sums)[:, None], mask=mask)
    tl.store(log_sum_ptr + slots, maxima + tl.log2(sums), mask=is_row)
