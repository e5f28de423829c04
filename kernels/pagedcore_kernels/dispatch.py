"""Each op where its tensors are: Triton on a CUDA device, plain torch elsewhere."""

from __future__ import annotations

import functools
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedcore_kernels.packed_weights import PackedWeights
from pagedcore_kernels.reference import packed_linear as reference_packed
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


def add_rms_norm_in_order(x: Tensor, residual: Tensor | None, weight: Tensor, order: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.rms_norm.add_rms_norm_in_order`. May change `residual`."""
    if not uses_triton(x):
        return reference_norms.add_rms_norm_in_order(x, residual, weight, order, eps=eps)
    from pagedcore_kernels.triton_ops import norms_in_order

    return norms_in_order.add_rms_norm_in_order(x, residual, weight, order, eps=eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: [M, K], [N, K], [N] -> [M, N]; a kernel of our own where steps with it were measured as faster."""
    if not uses_triton(x):
        return F.linear(x, weight, bias)
    from pagedcore_kernels.triton_ops.linear_settings import takes_skinny
    from pagedcore_kernels.triton_ops.skinny_linear import skinny_linear

    return skinny_linear(x, weight, bias) if takes_skinny(x, weight) else F.linear(x, weight, bias)


def reads_packed_weights(device: torch.device) -> bool:
    """Whether products with packed weights run as Triton kernels on `device`: CUDA from compute capability 8.0 on."""
    return device.type == "cuda" and has_triton() and torch.cuda.get_device_capability(device) >= (8, 0)


def packed_linear(x: Tensor, packed: PackedWeights, bias: Tensor | None = None) -> Tensor:
    """See `reference.packed_linear.packed_linear`."""
    if not uses_triton(x):
        return reference_packed.packed_linear(x, packed, bias)
    from pagedcore_kernels.triton_ops import packed_linear as triton_packed

    return triton_packed.packed_linear(x, packed, bias)


def take_columns(x: Tensor, order: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`x[:, order]`: [M, K], [K] int32 -> [M, K]; `out` if it is given, contiguous, of that shape and apart from `x`."""
    if not uses_triton(x):
        return torch.index_select(x, 1, order, out=out)
    from pagedcore_kernels.triton_ops import take_columns as triton_columns

    return triton_columns.take_columns(x, order, out=out)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul.silu_mul`."""
    if not uses_triton(gate_up):
        return reference_activation.silu_mul(gate_up)
    from pagedcore_kernels.triton_ops import activation

    return activation.silu_mul(gate_up)
