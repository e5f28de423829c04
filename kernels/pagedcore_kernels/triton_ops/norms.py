"""RMS normalisation, alone or after a residual addition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedcore_kernels.triton_ops.launch import dependent_launch

MAX_DIM = 16384
ELEMENTS_PER_PROGRAM = 1024


@dataclass(frozen=True, slots=True)
class NormLaunch:
    """Settings of one launch: a program normalises `rows` rows of up to `block_d` elements."""

    block_d: int
    rows: int
    num_warps: int


def choose_norm_launch(dim: int) -> NormLaunch:
    """One row a program, or as many short ones as keep its threads busy. Raises ValueError for a row that is too long."""
    if not 1 <= dim <= MAX_DIM:
        raise ValueError(f"Rows to normalise have {dim} elements; they may have 1 to {MAX_DIM}.")
    block_d = triton.next_power_of_2(dim)
    rows = max(1, ELEMENTS_PER_PROGRAM // block_d)
    return NormLaunch(block_d, rows, num_warps=min(16, max(4, block_d // 512)))


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """`weight * x / sqrt(mean(x ** 2) + eps)`; reference: `reference.rms_norm.rms_norm`.

    x is [..., D] with contiguous rows; weight is [D], or [N, D] for x of [..., N, D]. `out` is contiguous, of x's shape and dtype.
    Raises ValueError for other layouts.
    """
    return _normalise(x, None, weight, eps, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Add x to `residual` in place, then normalise the sum; reference: `reference.rms_norm.add_rms_norm`."""
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}, residual {tuple(residual.shape)} {residual.dtype}; they must be alike.")
    return _normalise(x, residual, weight, eps, out)


def _normalise(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    dim = x.shape[-1]
    launch = choose_norm_launch(dim)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if result.shape != x.shape or result.dtype != x.dtype or not result.is_contiguous():
        raise ValueError(f"out is {tuple(result.shape)} {result.dtype}; it must be contiguous, {tuple(x.shape)} {x.dtype}.")
    if x.numel() == 0:
        return result
    num_heads, weight_stride = _weight_rows(x, weight)
    rows = _as_rows(x, num_heads)
    sums = rows if residual is None else _as_rows(residual, num_heads)
    num_rows = x.numel() // dim
    _norm_kernel[(triton.cdiv(num_rows, launch.rows),)](
        rows,
        sums,
        weight,
        result,
        num_rows,
        num_heads,
        rows.stride(0),
        rows.stride(1),
        sums.stride(0),
        sums.stride(1),
        weight_stride,
        eps,
        D=dim,
        BLOCK_D=launch.block_d,
        ROWS=launch.rows,
        ADDS=residual is not None,
        num_warps=launch.num_warps,
        **dependent_launch(x),
    )
    return result


def _weight_rows(x: Tensor, weight: Tensor) -> tuple[int, int]:
    """Rows of x that take different rows of the weight, and the weight's stride between them."""
    if weight.stride(-1) == 1 and weight.shape == x.shape[-1:]:
        return 1, 0
    if weight.stride(-1) == 1 and weight.dim() == 2 and weight.shape == x.shape[-2:]:
        return weight.shape[0], weight.stride(0)
    shapes = f"weight is {tuple(weight.shape)}, x {tuple(x.shape)}"
    raise ValueError(f"{shapes}; weight must be the last one or two dimensions of x, its rows contiguous.")


def _as_rows(x: Tensor, num_heads: int) -> Tensor:
    """[T, N, D], a view with contiguous rows. Raises ValueError where there is none."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"The last dimension of x must be contiguous; its strides are {x.stride()}.")
    try:
        return x.view(-1, num_heads, x.shape[-1])
    except RuntimeError as error:
        raise ValueError(f"x of shape {tuple(x.shape)} and strides {x.stride()} has no view of evenly spaced rows.") from error


@triton.jit
def _norm_kernel(
    x_ptr,
    sum_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_heads,
    x_stride_0,
    x_stride_1,
    sum_stride_0,
    sum_stride_1,
    weight_stride,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    ADDS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """out = round(s / sqrt(mean(s ** 2) + eps)) * weight, with s = x, or s = x + sum, which then goes to sum."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // num_heads, row % num_heads
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (row < num_rows)[:, None] & (d < D)
    s = tl.load(x_ptr + (token * x_stride_0 + head * x_stride_1)[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + (head * weight_stride)[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        sum_ptrs = sum_ptr + (token * sum_stride_0 + head * sum_stride_1)[:, None] + d
        added = (s + tl.load(sum_ptrs, mask=inside, other=0.0).to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptrs, added, mask=inside)
        s = added.to(tl.float32)
    scale = tl.rsqrt(tl.sum(s * s, axis=1) / D + eps)
    normed = (s * scale[:, None]).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + (row * D)[:, None] + d, (normed * weight).to(out_ptr.dtype.element_ty), mask=inside)
