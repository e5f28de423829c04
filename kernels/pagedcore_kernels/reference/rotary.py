"""Rotary position embedding on whole heads, dimension i paired with i + D/2."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`(x1 cos - x2 sin, x2 cos + x1 sin)` for the halves x1, x2 of each head.

    x is [T, N, D], its strides free; cos and sin are [T, 1, D/2] in x's dtype, one row a token. Returns a new contiguous tensor.
    """
    x1, x2 = x.chunk(2, dim=-1)
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    low, high = rotated.chunk(2, dim=-1)
    torch.mul(x1, cos, out=low).addcmul_(x2, sin, value=-1.0)
    torch.mul(x2, cos, out=high).addcmul_(x1, sin)
    return rotated
