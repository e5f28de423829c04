"""Each op where its tensors are: Triton on a CUDA device, plain torch elsewhere."""

from __future__ import annotations

import functools
import importlib.util

import torch.nn.functional as F
from torch import Tensor

from pagedcore_kernels.reference import rms_norm as reference_norms
from pagedcore_kernels.reference import silu_mul as reference_activation


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def uses_triton(x: Tensor) -> bool:
    """Whether ops on `x` run as Triton kernels."""
    return x.is_cuda and has_triton()


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """See `reference.rms_norm.rms_norm`."""
    if not uses_triton(x):
        return reference_norms.rms_norm(x, weight, eps=eps)
    from pagedcore_kernels.triton_ops import norms

    return norms.rms_norm(x, weight, eps=eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """See `reference.rms_norm.add_rms_norm`. Changes `residual`."""
    if not uses_triton(x):
        return reference_norms.add_rms_norm(x, residual, weight, eps=eps)
    from pagedcore_kernels.triton_ops import norms

    return norms.add_rms_norm(x, residual, weight, eps=eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: [M, K], [N, K], [N] -> [M, N]; a kernel of our own where it was measured to beat the library's."""
    if not uses_triton(x):
        return F.linear(x, weight, bias)
    from pagedcore_kernels.triton_ops.linear_settings import is_faster
    from pagedcore_kernels.triton_ops.skinny_linear import skinny_linear

    return skinny_linear(x, weight, bias) if is_faster(x, weight) else F.linear(x, weight, bias)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul.silu_mul`."""
    if not uses_triton(gate_up):
        return reference_activation.silu_mul(gate_up)
    from pagedcore_kernels.triton_ops import activation

    return activation.silu_mul(gate_up)
