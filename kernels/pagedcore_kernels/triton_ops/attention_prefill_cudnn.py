"""Causal attention of one long run of queries by cuDNN: the sequence's keys are gathered, its cached part and its own part are merged."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedcore_kernels.triton_ops.attention_common import LOG2_E, make_output

MERGED_ROWS = 16


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

    `query` is [Q, H, D] in bf16 or fp16, the last Q of `seq_len` tokens whose keys are all in the caches [num_blocks, block_size, K, D];
    `block_table` is [max_blocks]. Takes memory for one gathered layer of the sequence. For few, long and alike lengths: cuDNN builds a
    plan, which takes long, for each pair of lengths that it has not met. Not for graphs: lengths are the host's.
    """
    num_queries = query.shape[0]
    num_cached = seq_len - num_queries
    keys = _gather(key_cache, block_table, seq_len)  # [1, K, L, D]
    values = _gather(value_cache, block_table, seq_len)
    queries = query.transpose(0, 1)[None]
    own, own_log_sums = _attend(queries, keys[:, :, num_cached:], values[:, :, num_cached:], True, scale)
    if num_cached == 0:
        result = own[0].transpose(0, 1)
        return result if out is None else out.copy_(result)
    cached, cached_log_sums = _attend(queries, keys[:, :, :num_cached], values[:, :, :num_cached], False, scale)
    return _merge(own[0], own_log_sums[0], cached[0], cached_log_sums[0], make_output(query, out))


def _gather(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    num_blocks = triton.cdiv(seq_len, cache.shape[1])
    return cache[block_table[:num_blocks]].flatten(0, 1)[:seq_len].transpose(0, 1)[None]


def _attend(query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """[1, H, Q, D] and its log-sums [1, H, Q]; on a CPU, where there is no cuDNN, by torch's own fused kernel."""
    # torch returns log-sums from these ops alone.
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, is_causal, scale=scale)  # noqa: SLF001
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention  # noqa: SLF001
    attended, log_sums = attend(query, keys, values, None, True, 0.0, is_causal, False, scale=scale)[:2]
    return attended, log_sums.view(query.shape[:3])


def _merge(own: Tensor, own_log_sums: Tensor, cached: Tensor, cached_log_sums: Tensor, result: Tensor) -> Tensor:
    num_queries, num_heads, head_dim = result.shape
    _merge_two[(triton.cdiv(num_queries, MERGED_ROWS), num_heads)](
        own,
        own_log_sums,
        cached,
        cached_log_sums,
        result,
        *own.stride()[:2],
        *own_log_sums.stride(),
        *cached.stride()[:2],
        *cached_log_sums.stride(),
        *result.stride()[:2],
        num_queries,
        LOG2_E,
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        ROWS=MERGED_ROWS,
    )
    return result


@triton.jit(do_not_specialize=["num_queries"])
def _merge_two(
    a_ptr,
    a_log_sum_ptr,
    b_ptr,
    b_log_sum_ptr,
    out_ptr,
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
    """(e^la a + e^lb b) / (e^la + e^lb) for the queries of one head."""
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
