"""Causal attention of one long run of queries by cuDNN, in pieces of few lengths: each piece's keys are gathered, the results merged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedcore_kernels.reference.kv_cache import indexable
from pagedcore_kernels.triton_ops.attention_common import LOG2_E, make_output

MERGED_ROWS = 16
LENGTH_UNIT = 1024
"""cuDNN builds a plan, which takes 50 ms, for each pair of lengths that it has not met: all lengths are multiples of this one."""
PIECE_LENGTHS = (8192, 4096, 2048, 1024)


@dataclass(frozen=True, slots=True)
class RunInPieces:
    """How a run of queries and the keys cached before it are cut.

    The last `front` cached keys count as the run's own, with a query of no meaning each, so that the others are a multiple of
    the unit; behind the run, queries and keys are padded to `width`. A causal mask keeps real queries from padded keys.
    """

    front: int
    width: int
    pieces: tuple[tuple[int, int], ...]
    """[begin, end) of the cached keys before them."""

    @classmethod
    def of(cls, num_queries: int, num_cached: int) -> RunInPieces:
        front = num_cached % LENGTH_UNIT
        pieces, begin = [], 0
        for length in PIECE_LENGTHS:
            while num_cached - front - begin >= length:
                pieces.append((begin, begin + length))
                begin += length
        return cls(front, triton.cdiv(front + num_queries, LENGTH_UNIT) * LENGTH_UNIT, tuple(pieces))


def paged_attention_prefill_cudnn(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    *,
    seq_len: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q k^T + causal mask) v of one sequence. Reference: `reference.attention.paged_attention`.

    `query` is [Q, H, D] in bf16 or fp16, the last Q of `seq_len` tokens whose keys are all in the caches [num_blocks, block_size, K, D],
    whose block size divides `LENGTH_UNIT`; `block_table` is [max_blocks]. Takes memory for the keys and values of the run or of the
    longest piece, gathered, and for two results. For many queries. Not for graphs: lengths are the host's.
    """
    num_queries = query.shape[0]
    run = RunInPieces.of(num_queries, seq_len - num_queries)
    caches, real = (key_cache, value_cache), slice(run.front, run.front + num_queries)
    queries = _pad_queries(query, run)
    own_begin = seq_len - num_queries - run.front
    keys, values = (_gather(cache, block_table, own_begin, seq_len, run.width).to(query.dtype) for cache in caches)
    result, log_sums = (x[:, real] for x in _attend(queries, keys, values, True, scale))
    if not run.pieces:
        result = result.transpose(0, 1)
        return result if out is None else out.copy_(result)
    for begin, end in run.pieces:
        keys, values = (_gather(cache, block_table, begin, end, end - begin).to(query.dtype) for cache in caches)
        piece, piece_log_sums = (x[:, real] for x in _attend(queries, keys, values, False, scale))
        is_last = end == own_begin
        merged = make_output(query, out) if is_last else torch.empty(query.shape, dtype=torch.float32, device=query.device)
        log_sums = _merge(result, log_sums, piece, piece_log_sums, merged)
        result = merged.transpose(0, 1)
    return merged


def _pad_queries(query: Tensor, run: RunInPieces) -> Tensor:
    """[1, H, width, D], zeros where there is no query."""
    num_queries = query.shape[0]
    if num_queries < run.width:
        padded = query.new_zeros(run.width, *query.shape[1:])
        padded[run.front : run.front + num_queries] = query
        query = padded
    return query.transpose(0, 1)[None]


def _gather(cache: Tensor, block_table: Tensor, begin: int, end: int, width: int) -> Tensor:
    """[1, K, width, D]: the keys at positions [begin, end), `begin` the first of a block, then zeros."""
    block_size = cache.shape[1]
    blocks = block_table[begin // block_size : triton.cdiv(end, block_size)]
    gathered = cache.new_empty(width, *cache.shape[2:])
    torch.index_select(indexable(cache), 0, blocks, out=indexable(gathered)[: len(blocks) * block_size].unflatten(0, (-1, block_size)))
    indexable(gathered)[end - begin :] = 0
    return gathered.transpose(0, 1)[None]


def _attend(query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """[H, Q, D] and its log-sums [H, Q]; on a CPU, where there is no cuDNN, by torch's own fused kernel."""
    # torch returns log-sums from these ops alone.
    if query.device.type == "cpu":
        attended, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, is_causal, scale=scale)  # noqa: SLF001
    else:
        attend = torch.ops.aten._scaled_dot_product_cudnn_attention  # noqa: SLF001
        attended, log_sums = attend(query, keys, values, None, True, 0.0, is_causal, False, scale=scale)[:2]
    return attended[0], log_sums.view(query.shape[1:3])


def _merge(a: Tensor, a_log_sums: Tensor, b: Tensor, b_log_sums: Tensor, result: Tensor) -> Tensor:
    """Changes `result` [Q, H, D] and returns its log-sums [H, Q]."""
    num_queries, num_heads, head_dim = result.shape
    log_sums = torch.empty(num_heads, num_queries, dtype=torch.float32, device=result.device)
    _merge_two[(triton.cdiv(num_queries, MERGED_ROWS), num_heads)](
        a,
        a_log_sums,
        b,
        b_log_sums,
        result,
        log_sums,
        *a.stride()[:2],
        *a_log_sums.stride(),
        *b.stride()[:2],
        *b_log_sums.stride(),
        *result.stride()[:2],
        num_queries,
        LOG2_E,
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        ROWS=MERGED_ROWS,
    )
    return log_sums


@triton.jit(do_not_specialize=["num_queries"])
def _merge_two(
    a_ptr,
    a_log_sum_ptr,
    b_ptr,
    b_log_sum_ptr,
    out_ptr,
    out_log_sum_ptr,
    a_stride_h,
    a_stride_q,
    a_log_sum_stride_h,
    a_log_sum_stride_q,
    b_stride_h,
    b_stride_q,
    b_log_sum_stride_h,
    b_log_sum_stride_q,
    out_stride_q,
    out_stride_h,
    num_queries,
    log2_e,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """(e^la a + e^lb b) / (e^la + e^lb) for the queries of one head, and log(e^la + e^lb)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM_PAD)
    is_row = rows < num_queries
    mask = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    a_log_sums = tl.load(a_log_sum_ptr + head * a_log_sum_stride_h + rows * a_log_sum_stride_q, mask=is_row, other=0.0)
    b_log_sums = tl.load(b_log_sum_ptr + head * b_log_sum_stride_h + rows * b_log_sum_stride_q, mask=is_row, other=0.0)
    b_share = 1.0 / (1.0 + tl.exp2((a_log_sums - b_log_sums) * log2_e))
    a = tl.load(a_ptr + head * a_stride_h + (rows * a_stride_q)[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + head * b_stride_h + (rows * b_stride_q)[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    merged = a + (b - a) * b_share[:, None]
    out_offsets = (rows * out_stride_q + head * out_stride_h)[:, None] + dims[None, :]
    tl.store(out_ptr + out_offsets, merged.to(out_ptr.dtype.element_ty), mask=mask)
    larger = tl.maximum(a_log_sums, b_log_sums)
    log_sums = larger + tl.log2(1.0 + tl.exp2((tl.minimum(a_log_sums, b_log_sums) - larger) * log2_e)) / log2_e
    tl.store(out_log_sum_ptr + head * num_queries + rows, log_sums, mask=is_row)
