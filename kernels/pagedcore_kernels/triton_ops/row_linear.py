"""Products of one row with a plain matrix, with what stands before and after them in a decoder layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedcore_kernels.triton_ops.attention_common import card_of
from pagedcore_kernels.triton_ops.linear_settings import RowConfig, choose_row_config
from pagedcore_kernels.triton_ops.split_k import SplitKWorkspace, launch_options, split_k_workspace, store_sum_of_splits

MAX_PRODUCT_VALUES = 2**31 - 1
_PLAIN, _RMS_NORM, _SILU_MUL = 0, 1, 2


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    config: RowConfig | None = None,
    workspace: SplitKWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`residual + (x @ weight.T + bias)`: [1, K], [N, K], [N] -> [1, N]; `out` if it is given, which may be `residual` itself.

    The product is rounded before the residual is added. Raises ValueError for tensors that the kernel does not read.
    """
    check_operands(x, weight, bias, in_features=x.shape[-1])
    return _launch(_PLAIN, x, weight, bias, None, 0.0, residual, config, workspace, out)


def norm_row_linear(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    config: RowConfig | None = None,
    workspace: SplitKWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`rms_norm(x, norm_weight) @ weight.T + bias`, with every rounding of the two ops: [1, K], [K], [N, K], [N] -> [1, N]."""
    check_operands(x, weight, bias, in_features=x.shape[-1])
    if norm_weight.shape != x.shape[1:] or norm_weight.dtype != x.dtype or not norm_weight.is_contiguous():
        raise ValueError(
            f"norm_weight must be contiguous, {x.dtype} and {list(x.shape[1:])}; it is {norm_weight.dtype}, {tuple(norm_weight.shape)}"
        )
    return _launch(_RMS_NORM, x, weight, bias, norm_weight, eps, None, config, workspace, out)


def silu_mul_row_linear(
    gate_up: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    config: RowConfig | None = None,
    workspace: SplitKWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`residual + (silu_mul(gate_up) @ weight.T + bias)`, with every rounding of the ops: [1, 2 K], [N, K], [N] -> [1, N]."""
    check_operands(gate_up, weight, bias, in_features=gate_up.shape[-1] // 2)
    return _launch(_SILU_MUL, gate_up, weight, bias, None, 0.0, residual, config, workspace, out)


def check_operands(x: Tensor, weight: Tensor, bias: Tensor | None, *, in_features: int, max_rows: int = 1) -> None:
    """Raises ValueError unless x is [1 to max_rows, ...], the weight [N, in_features] and all are as the kernels read them."""
    if x.dim() != 2 or not 1 <= x.shape[0] <= max_rows:
        raise ValueError(f"1 to {max_rows} rows can be multiplied, x has the shape {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != in_features:
        raise ValueError(f"the weight must have the shape [N, {in_features}], it has {tuple(weight.shape)}")
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


def _launch(
    kind: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    config: RowConfig | None,
    workspace: SplitKWorkspace | None,
    out: Tensor | None,
) -> Tensor:
    out_features, in_features = weight.shape
    result = make_product(x, out_features, out)
    if residual is not None:
        make_product(x, out_features, residual)
    card = card_of(x.device)
    chosen = config or choose_row_config(out_features, in_features, capability=card.capability)
    space = workspace or split_k_workspace(x.device)
    splits = space.fitting(chosen.splits, 1, out_features, chosen.block_n)
    _row_kernel[(triton.cdiv(out_features, chosen.block_n), splits)](
        x,
        weight,
        weight if bias is None else bias,
        weight if norm_weight is None else norm_weight,
        weight if residual is None else residual,
        result,
        space.partials,
        space.counters,
        out_features,
        in_features,
        weight.stride(0),
        eps,
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        SPLITS=splits,
        LOOPS=chosen.block_k * splits < in_features,
        INPUT=kind,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        PDL=card.has_dependent_launch,
        **launch_options(chosen.num_warps, pdl=card.has_dependent_launch),
    )
    return result


@triton.jit
def _inverse_rms(x_ptr, K, eps, columns, BLOCK_K: tl.constexpr, IS_WHOLE: tl.constexpr) -> tl.tensor:
    """1 / sqrt(mean(x ** 2) + eps) over the K values of the row, which are `columns` if IS_WHOLE."""
    if IS_WHOLE:
        x = tl.load(x_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
        squares = x * x
    else:
        squares = tl.zeros([BLOCK_K], tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            some = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + some, mask=some < K, other=0.0).to(tl.float32)
            squares += x * x
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)


@triton.jit
def _read_input(x_ptr, norm, columns, in_range, K, scale, INPUT: tl.constexpr) -> tl.tensor:
    """Values of the row as the product takes them, float32; rounded wherever an op of its own would have stored them."""
    x = tl.load(x_ptr + columns, mask=in_range, other=0.0)
    dtype: tl.constexpr = x.dtype
    wide = x.to(tl.float32)
    if INPUT == 1:
        wide = ((wide * scale).to(dtype).to(tl.float32) * norm).to(dtype).to(tl.float32)
    if INPUT == 2:
        up = tl.load(x_ptr + K + columns, mask=in_range, other=0.0).to(tl.float32)
        gate = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
        wide = (gate * up).to(dtype).to(tl.float32)
    return wide


@triton.jit
def _row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    N,
    K,
    weight_stride_0,
    eps,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    LOOPS: tl.constexpr,
    INPUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """out[n] = residual[n] + (sum over k of weight[n, k] f(x)[k] + bias[n]); reference: reference/linear.py.

    f is nothing (INPUT 0), RMS normalisation (1), or silu(x[:K]) * x[K:] (2).
    The tile after the present one is always in flight, the first since before the wait for the kernel that makes x.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = rows < N
    first = split * (tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K)
    last = tl.minimum(first + tl.cdiv(tl.cdiv(K, SPLITS), BLOCK_K) * BLOCK_K, K)
    columns = first + tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + rows.to(tl.int64)[:, None] * weight_stride_0 + columns[None, :]
    weights = tl.load(weight_ptrs, mask=in_rows[:, None] & (columns < last)[None, :], other=0.0, eviction_policy="evict_first")
    bias = tl.load(bias_ptr + rows, mask=in_rows, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    norm = tl.load(norm_ptr + columns, mask=columns < last, other=0.0).to(tl.float32) if INPUT == 1 else 1.0
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    scale = _inverse_rms(x_ptr, K, eps, columns, BLOCK_K, SPLITS == 1 and not LOOPS) if INPUT == 1 else 1.0
    x = _read_input(x_ptr, norm, columns, columns < last, K, scale, INPUT)
    if LOOPS:
        sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for _ in tl.range(first + BLOCK_K, last, BLOCK_K):
            columns += BLOCK_K
            weight_ptrs += BLOCK_K
            in_range = columns < last
            next_weights = tl.load(weight_ptrs, mask=in_rows[:, None] & in_range[None, :], other=0.0, eviction_policy="evict_first")
            next_norm = tl.load(norm_ptr + columns, mask=in_range, other=0.0).to(tl.float32) if INPUT == 1 else 1.0
            next_x = _read_input(x_ptr, next_norm, columns, in_range, K, scale, INPUT)
            sums += weights.to(tl.float32) * x[None, :]
            weights = next_weights
            x = next_x
        part = tl.sum(sums + weights.to(tl.float32) * x[None, :], 1)
    else:
        part = tl.sum(weights.to(tl.float32) * x[None, :], 1)
    store_sum_of_splits(part, bias, rows, in_rows, out_ptr, partials_ptr, counters_ptr, tile, split, N, SPLITS, residual_ptr, HAS_RESIDUAL)
