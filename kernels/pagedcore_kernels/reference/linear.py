"""Products with few rows, in plain torch."""

from __future__ import annotations

from torch import Tensor

from pagedcore_kernels.reference.rms_norm import rms_norm
from pagedcore_kernels.reference.silu_mul import silu_mul


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, summed in float32 and rounded once: [M, K], [N, K], [N] -> [M, N] in x's dtype, `out` if it is given."""
    total = x.float() @ weight.float().t()
    if bias is not None:
        total += bias.float()
    return total.to(x.dtype) if out is None else out.copy_(total)


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`residual + (x @ weight.T + bias)`, the product rounded before the residual is added."""
    product = skinny_linear(x, weight, bias)
    result = product if residual is None else product + residual
    return result if out is None else out.copy_(result)


def norm_row_linear(
    x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """`rms_norm(x, norm_weight) @ weight.T + bias`."""
    return skinny_linear(rms_norm(x, norm_weight, eps=eps), weight, bias, out=out)


def silu_mul_row_linear(
    gate_up: Tensor, weight: Tensor, bias: Tensor | None = None, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`residual + (silu_mul(gate_up) @ weight.T + bias)`."""
    return row_linear(silu_mul(gate_up), weight, bias, residual=residual, out=out)
