"""Products of one or two rows with a plain matrix, bound by the bandwidth at which the matrix is read; and the checks of its operands."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedcore_kernels.triton_ops.attention_common import card_of
from pagedcore_kernels.triton_ops.linear_settings import RowConfig
from pagedcore_kernels.triton_ops.split_k import SplitKWorkspace, launch_options, split_k_workspace, store_sum_of_splits

MAX_PRODUCT_VALUES = 2**31 - 1
MAX_ROWS_A_TILE = 2
"""Rows that a program multiplies with its tile."""


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: RowConfig,
    workspace: SplitKWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias`, summed in float32: [M, K], [N, K], [N] -> [M, N]; `out` if it is given.

    M is 1, or 2 where `config.holds_whole_rows(K)`. Raises ValueError for tensors that the kernel does not read.
    """
    check_operands(x, weight, bias, max_rows=MAX_ROWS_A_TILE if config.holds_whole_rows(weight.shape[-1]) else 1)
    check_product_size(x.shape[0], weight.shape[0])
    result = make_product(x, weight.shape[0], out)
    _launch(config, x, weight, bias, result, workspace or split_k_workspace(x.device), card_of(x.device).has_dependent_launch)
    return result


def check_operands(x: Tensor, weight: Tensor, bias: Tensor | None, *, max_rows: int = 1) -> None:
    """Raises ValueError unless x is [1 to max_rows, K], the weight [N, K] and all are as the kernels read them."""
    if x.dim() != 2 or not 1 <= x.shape[0] <= max_rows:
        raise ValueError(f"1 to {max_rows} rows can be multiplied, x has the shape {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"the weight must have the shape [N, {x.shape[1]}], it has {tuple(weight.shape)}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32) or weight.dtype != x.dtype:
        raise ValueError(f"x and weight must be of one dtype of float16, bfloat16 and float32: {x.dtype} and {weight.dtype}")
    if x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(f"the rows of x and weight must be contiguous, their strides are {x.stride()}, {weight.stride()}")
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        raise ValueError(f"the bias must be contiguous and have the shape [{weight.shape[0]}], it has {tuple(bias.shape)}")


def make_product(x: Tensor, out_features: int, out: Tensor | None) -> Tensor:
    """`out`, or a new [rows of x, out_features]. Raises ValueError if `out` does not fit."""
    if out is None:
        return torch.empty(x.shape[0], out_features, dtype=x.dtype, device=x.device)
    if out.shape != (x.shape[0], out_features) or out.dtype != x.dtype or not out.is_contiguous():
        wanted = f"contiguous, {x.dtype} and [{x.shape[0]}, {out_features}]"
        raise ValueError(f"out must be {wanted}; it is {out.dtype}, {tuple(out.shape)}, {out.stride()}")
    return out


def check_product_size(num_rows: int, out_features: int) -> None:
    """Raises ValueError for more values than the kernels count in 32 bits, where they store sums."""
    if num_rows * out_features > MAX_PRODUCT_VALUES:
        values = f"{num_rows} rows of {out_features} outputs are {num_rows * out_features} values"
        raise ValueError(f"{values}; one product makes up to {MAX_PRODUCT_VALUES}: multiply fewer rows at once")


def _launch(config: RowConfig, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, workspace: SplitKWorkspace, pdl: bool) -> None:
    out_features, in_features = weight.shape
    num_rows = x.shape[0]
    splits = workspace.fitting(config.splits, num_rows, out_features, config.block_n)
    _row_kernel[(triton.cdiv(out_features, config.block_n), splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        workspace.partials,
        workspace.counters,
        out_features,
        in_features,
        in_features if num_rows == 1 else x.stride(0),  # one row has no stride: each other value would be compiled for
        weight.stride(0),
        ROWS=num_rows,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLITS=splits,
        LOOPS=config.block_k * splits < in_features,
        HAS_BIAS=bias is not None,
        PDL=pdl,
        **launch_options(config.num_warps, pdl=pdl),
    )


@triton.jit
def _row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    N,
    K,
    x_stride_0,
    weight_stride_0,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    LOOPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """out[m, n] = sum over k of weight[n, k] x[m, k] + bias[n]; reference: reference/linear.py.

    The tile after the present one is always in flight, the first since before the wait for the kernel that makes x. Two rows
    are multiplied one after the other with a tile that holds all inputs of its outputs, each as if it were alone.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < N
    first = split * (tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K)
    last = tl.minimum(first + tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K, K)
    columns = first + tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + outputs.to(tl.int64)[:, None] * weight_stride_0 + columns[None, :]
    weights = tl.load(weight_ptrs, mask=is_output[:, None] & (columns < last)[None, :], other=0.0, eviction_policy="evict_first")
    bias = tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :] if HAS_BIAS else 0.0
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if LOOPS:
        x = tl.load(x_ptr + columns, mask=columns < last, other=0.0).to(tl.float32)
        sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for _ in tl.range(first + BLOCK_K, last, BLOCK_K):
            columns += BLOCK_K
            weight_ptrs += BLOCK_K
            in_range = columns < last
            next_weights = tl.load(weight_ptrs, mask=is_output[:, None] & in_range[None, :], other=0.0, eviction_policy="evict_first")
            next_x = tl.load(x_ptr + columns, mask=in_range, other=0.0).to(tl.float32)
            sums += weights.to(tl.float32) * x[None, :]
            weights = next_weights
            x = next_x
        sums = tl.sum(sums + weights.to(tl.float32) * x[None, :], 1)[None, :]
    else:
        sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for row in tl.static_range(ROWS):
            x = tl.load(x_ptr + row * x_stride_0 + columns, mask=columns < last, other=0.0).to(tl.float32)
            part = tl.sum(weights.to(tl.float32) * x[None, :], 1)
            sums = tl.where(tl.arange(0, ROWS)[:, None] == row, part[None, :], sums)
    offsets, mask = tl.arange(0, ROWS)[:, None] * N + outputs[None, :], is_output[None, :]
    store_sum_of_splits(sums, bias, offsets, mask, out_ptr, partials_ptr, counters_ptr, tile, split, ROWS * N, SPLITS)
