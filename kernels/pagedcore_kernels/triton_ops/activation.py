"""The gate of a SwiGLU feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedcore_kernels.triton_ops.launch import dependent_launch

BLOCK = 1024


def silu_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`silu(gate) * up` of the halves of the last dimension, [..., 2 I] -> [..., I]; reference: `reference.silu_mul.silu_mul`.

    `gate_up` is a matrix, its rows at any stride, or contiguous; `out` is contiguous. Raises ValueError for other layouts.
    """
    width = gate_up.shape[-1] // 2
    shape = (*gate_up.shape[:-1], width)
    result = torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    if result.shape != shape or result.dtype != gate_up.dtype or not result.is_contiguous():
        raise ValueError(f"out is {tuple(result.shape)} {result.dtype}; it must be contiguous, {shape} {gate_up.dtype}.")
    if gate_up.stride(-1) != 1 or not (gate_up.dim() == 2 or gate_up.is_contiguous()):
        raise ValueError(f"gate_up must be contiguous, or a matrix with contiguous rows; its strides are {gate_up.stride()}.")
    if result.numel() == 0:
        return result
    rows = gate_up.view(-1, 2 * width) if gate_up.dim() != 2 else gate_up
    grid = (rows.shape[0], triton.cdiv(width, BLOCK))
    _silu_mul_kernel[grid](rows, result, width, rows.stride(0), BLOCK=BLOCK, num_warps=4, **dependent_launch(gate_up))
    return result


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, width, row_stride, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    """out = round(gate / (1 + exp(-gate))) * up."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_ptrs = gate_up_ptr + row * row_stride + column
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + width, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * width + column, (activated * up).to(out_ptr.dtype.element_ty), mask=inside)
