"""Products with few rows, in plain torch."""

from __future__ import annotations

from torch import Tensor


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, summed in float32 and rounded once: [M, K], [N, K], [N] -> [M, N] in x's dtype, `out` if it is given."""
    total = x.float() @ weight.float().t()
    if bias is not None:
        total += bias.float()
    return total.to(x.dtype) if out is None else out.copy_(total)
