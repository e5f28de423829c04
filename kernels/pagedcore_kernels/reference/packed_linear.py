"""Products with packed weights, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedcore_kernels.packed_weights import PackedWeights, unpack_weights


def packed_linear(x: Tensor, packed: PackedWeights, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """`x @ W.T + bias` with W in float32, rounded once: [M, K] -> [M, N] in x's dtype, `out` if it is given."""
    total = x.float() @ dequantize(packed, torch.float32).t()
    if bias is not None:
        total += bias.float()
    return total.to(x.dtype) if out is None else out.copy_(total)


def dequantize(packed: PackedWeights, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """W [N, K]: computed in float32, rounded once to `dtype`; `out` if it is given."""
    codes, scales, zeros = unpack_weights(packed)
    scales, zeros = (part.repeat_interleave(packed.group_size, dim=1)[:, : packed.in_features] for part in (scales, zeros))
    weight = (codes.float() - zeros.float()) * scales
    return weight.to(dtype) if out is None else out.copy_(weight)
