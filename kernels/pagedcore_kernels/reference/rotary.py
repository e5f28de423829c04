"""Rotary position embedding on whole heads, dimension i paired with i + D/2."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedcore_kernels.reference.rms_norm import rms_norm


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


def rotate_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [T, H, D], key and value [T, K, D] of `qkv` [T, H + 2 K, D].

    Queries and keys pass an RMS norm a head, where norms [D] are given, and `rotary`.
    """
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    query_key, value = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
    if query_norm is not None and key_norm is not None:
        query, key = query_key[:, :num_heads], query_key[:, num_heads:]
        query_key = torch.cat((rms_norm(query, query_norm, eps=eps), rms_norm(key, key_norm, eps=eps)), dim=1)
    query_key = rotary(query_key, cos, sin)
    return query_key[:, :num_heads], query_key[:, num_heads:], value
