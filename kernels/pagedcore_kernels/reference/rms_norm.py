"""RMS normalisation, alone or after a residual addition."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x ** 2) + eps)` over the last dimension, the quotient in float32 and rounded to x's dtype before the weight.

    x is [..., D]; weight is [D], or any shape that broadcasts to x (one row a head). Returns a new tensor of x's shape and dtype.
    """
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Add x to `residual` in place, then `rms_norm` of the sum; `residual` holds the sum afterwards."""
    return rms_norm(residual.add_(x), weight, eps=eps)


def add_rms_norm_in_order(x: Tensor, residual: Tensor | None, weight: Tensor, order: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm` of x + residual [T, D], its columns in `order` [D] int32, and the sum itself, in order, which may be one of the two.

    Without `residual` the sum is x. An implementation may change `residual`: it is not to be used afterwards.
    """
    summed = x if residual is None else residual + x
    return rms_norm(summed, weight, eps=eps).index_select(1, order), summed
