"""A residual addition and RMS normalisation whose result comes in another order: what a matrix with sorted inputs reads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedcore_kernels.triton_ops.launch import dependent_launch
from pagedcore_kernels.triton_ops.norms import add_rms_norm, choose_norm_launch, rms_norm
from pagedcore_kernels.triton_ops.take_columns import take_columns

MAX_ROWS = 128
"""With more, norm and order in a launch each are faster: the order is followed in the normed rows alone, here in x and residual."""
MAX_DIM = 8192
"""Longer rows, too, take a launch each: they do not stay in a program's registers."""
MAX_PARTS = 4
MAX_PROGRAMS = 64
"""As long as there are fewer, rows are shared by programs: following the order takes one multiprocessor longer than all else."""


def add_rms_norm_in_order(x: Tensor, residual: Tensor | None, weight: Tensor, order: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.rms_norm.add_rms_norm_in_order`. Matrices with contiguous rows alike; ValueError for others."""
    _check(x, residual, weight, order)
    if x.shape[0] > MAX_ROWS or x.shape[1] > MAX_DIM:
        return _in_two_launches(x, residual, weight, order, eps)
    num_rows, dim = x.shape
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = x if residual is None else torch.empty_like(result)
    if num_rows == 0:
        return result, summed
    launch = choose_norm_launch(dim)
    num_parts = choose_num_parts(num_rows, launch.block_d)
    _norm_in_order_kernel[(num_rows, num_parts)](
        x,
        x if residual is None else residual,
        weight,
        order,
        summed,
        result,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        D=dim,
        BLOCK_D=launch.block_d,
        PART_D=launch.block_d // num_parts,
        ADDS=residual is not None,
        num_warps=4 if launch.block_d <= 4096 else launch.num_warps,
        **dependent_launch(x),
    )
    return result, summed


def choose_num_parts(num_rows: int, block_d: int) -> int:
    """Programs that share a row; a power of two, none with fewer than 32 elements."""
    num_parts = MAX_PARTS
    while num_parts > 1 and (num_rows * num_parts > MAX_PROGRAMS or block_d // num_parts < 32):
        num_parts //= 2
    return num_parts


def _check(x: Tensor, residual: Tensor | None, weight: Tensor, order: Tensor) -> None:
    if x.dim() != 2 or x.stride(1) != 1 or (residual is not None and (residual.shape != x.shape or residual.stride(1) != 1)):
        given = " and ".join(f"{tuple(one.shape)}, strides {one.stride()}" for one in (x, residual) if one is not None)
        raise ValueError(f"x must be a matrix with contiguous rows, and residual like it; {given}.")
    if residual is not None and residual.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype} and residual {residual.dtype}; they must be alike.")
    if weight.shape != x.shape[1:] or order.shape != x.shape[1:] or not (weight.is_contiguous() and order.is_contiguous()):
        raise ValueError(f"weight and order must be contiguous and [{x.shape[1]}]; {tuple(weight.shape)} and {tuple(order.shape)}.")
    if order.dtype != torch.int32:
        raise ValueError(f"order must be int32, not {order.dtype}.")


def _in_two_launches(x: Tensor, residual: Tensor | None, weight: Tensor, order: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if residual is None:
        return take_columns(rms_norm(x, weight, eps=eps), order), x
    return take_columns(add_rms_norm(x, residual, weight, eps=eps), order), residual


@triton.jit
def _norm_in_order_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    order_ptr,
    sum_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PART_D: tl.constexpr,
    ADDS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """out[k] = round(s[i] / sqrt(mean(s ** 2) + eps)) * weight[i] with i = order[k] and s = x, or s = x + residual, which goes to sum.

    Each program of a row takes the mean of all of it, and gives a part of both results.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    k = tl.program_id(1) * PART_D + tl.arange(0, PART_D)
    is_part = k < D
    source = tl.load(order_ptr + k, mask=is_part, other=0)  # written at load, as the weight is: nothing to wait for
    weight = tl.load(weight_ptr + source, mask=is_part, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_ptr += row * x_stride
    residual_ptr += row * residual_stride
    s = _summed(x_ptr, residual_ptr, d, d < D, ADDS)
    taken = _summed(x_ptr, residual_ptr, source, is_part, ADDS)
    if ADDS:
        tl.store(sum_ptr + row * D + k, _summed(x_ptr, residual_ptr, k, is_part, ADDS).to(sum_ptr.dtype.element_ty), mask=is_part)
    scale = tl.rsqrt(tl.sum(s * s) / D + eps)
    normed = (taken * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * D + k, (normed * weight).to(out_ptr.dtype.element_ty), mask=is_part)


@triton.jit
def _summed(x_ptr, residual_ptr, places, mask, ADDS: tl.constexpr):
    """x + residual at `places`, rounded as it is stored, float32."""
    x = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
    return x.to(x_ptr.dtype.element_ty).to(tl.float32)
