"""The columns of a matrix in another order: how inputs meet weights that were put into the order of their groups."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedcore_kernels.triton_ops.launch import dependent_launch

BLOCK = 1024


def take_columns(x: Tensor, order: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x[:, order]`: [M, K] with contiguous rows, [K] int32 -> [M, K] contiguous; `out` if it is given. Raises ValueError for others."""
    if x.dim() != 2 or x.stride(1) != 1 or order.shape != x.shape[1:] or order.dtype != torch.int32:
        raise ValueError(f"x must be a matrix with contiguous rows and order int32 of its width; {tuple(x.shape)}, {tuple(order.shape)}")
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if result.shape != x.shape or result.dtype != x.dtype or not result.is_contiguous():
        raise ValueError(f"out is {tuple(result.shape)} {result.dtype}; it must be contiguous, {tuple(x.shape)} {x.dtype}.")
    if result.numel():
        grid = (x.shape[0], triton.cdiv(x.shape[1], BLOCK))
        _take_columns_kernel[grid](x, order, result, x.shape[1], x.stride(0), BLOCK=BLOCK, num_warps=4, **dependent_launch(x))
    return result


@triton.jit
def _take_columns_kernel(x_ptr, order_ptr, out_ptr, width, row_stride, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    """out[m, k] = x[m, order[k]]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = tl.load(order_ptr + column, mask=inside, other=0)  # written at load: nothing to wait for
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tl.store(out_ptr + row * width + column, tl.load(x_ptr + row * row_stride + source, mask=inside), mask=inside)
