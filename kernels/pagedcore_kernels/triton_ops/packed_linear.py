"""Products of 16-bit rows with packed weights of 4 and 8 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedcore_kernels.packed_weights import PackedWeights
from pagedcore_kernels.triton_ops.attention_common import card_of
from pagedcore_kernels.triton_ops.dequantize import dequantize
from pagedcore_kernels.triton_ops.packed_few_rows import MAX_FEW_ROWS, multiply_few_rows
from pagedcore_kernels.triton_ops.packed_many_rows import multiply_many_rows
from pagedcore_kernels.triton_ops.packed_settings import FewRowsConfig, PackedConfig, choose_packed_config, multiplies_packed
from pagedcore_kernels.triton_ops.row_linear import check_product_size, make_product
from pagedcore_kernels.triton_ops.split_k import SplitKWorkspace, split_k_workspace


def packed_linear(
    x: Tensor,
    packed: PackedWeights,
    bias: Tensor | None = None,
    *,
    config: PackedConfig | None = None,
    workspace: SplitKWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`x @ W.T + bias`: [M, K] float16 or bfloat16 -> [M, N]; `out` if it is given.

    Many rows are multiplied with a plain copy of the weights, made for this product and freed after it. May be captured in a graph once
    one product ran outside of one on that device; gives the same bits for the same configuration. Raises ValueError for tensors that
    the kernels do not read.
    """
    _check(x, packed, bias)
    if x.shape[0] == 0:
        return make_product(x, packed.out_features, out)
    if config is None and not multiplies_packed(x.shape[0]):
        product = F.linear(x, dequantize(packed, x.dtype), bias)
        return product if out is None else make_product(x, packed.out_features, out).copy_(product)
    check_product_size(x.shape[0], packed.out_features)
    result = make_product(x, packed.out_features, out)
    card = card_of(x.device)
    space = workspace or split_k_workspace(x.device)
    chosen = config or choose_packed_config(x.shape[0], packed, x.dtype, card)
    if isinstance(chosen, FewRowsConfig):
        _check_few(x)
        multiply_few_rows(chosen, x, packed, bias, result, space, pdl=card.has_dependent_launch)
    else:
        multiply_many_rows(chosen, x, packed, bias, result, space, pdl=card.has_dependent_launch)
    return result


def _check(x: Tensor, packed: PackedWeights, bias: Tensor | None) -> None:
    if x.dim() != 2 or x.shape[1] != packed.in_features or x.stride(1) != 1:
        raise ValueError(f"x must have the shape [rows, {packed.in_features}] and contiguous rows, it has {tuple(x.shape)}, {x.stride()}")
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x must be float16 or bfloat16 beside packed weights, it is {x.dtype}")
    if bias is not None and (bias.shape != (packed.out_features,) or not bias.is_contiguous()):
        raise ValueError(f"the bias must be contiguous and have the shape [{packed.out_features}], it has {tuple(bias.shape)}")


def _check_few(x: Tensor) -> None:
    if x.shape[0] > MAX_FEW_ROWS:
        raise ValueError(f"a configuration for few rows takes up to {MAX_FEW_ROWS}, x has {x.shape[0]}")
