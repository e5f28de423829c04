"""Matrices of one input, one above the other."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from pagedcore.quant.quantized_matrix import QuantizedMatrix

T = TypeVar("T", Tensor, Tensor | None)


def stack(parts: list[Tensor]) -> Tensor:
    """Stacked by the first dimension; a single part stays the tensor it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def in_order(outputs: T, order: Tensor | None) -> T:
    """Of a matrix or a bias, if there is one, the outputs `order` names: [out] integers, or None for all as they stand."""
    return outputs if outputs is None or order is None else outputs.index_select(0, order)


def stack_quantized(parts: list[QuantizedMatrix]) -> QuantizedMatrix | None:
    """Stacked by output; None where the parts differ in bits or groups, which one matrix cannot say."""
    first = parts[0]
    if any((part.bits, part.num_groups) != (first.bits, first.num_groups) or not _same_groups(part, first) for part in parts):
        return None
    return QuantizedMatrix(
        codes=stack([part.codes for part in parts]),
        scales=stack([part.scales for part in parts]),
        zeros=stack([part.zeros for part in parts]),
        bits=first.bits,
        group_of_input=first.group_of_input,
    )


def _same_groups(one: QuantizedMatrix, other: QuantizedMatrix) -> bool:
    if one.group_of_input is None or other.group_of_input is None:
        return one.group_of_input is other.group_of_input
    return torch.equal(one.group_of_input, other.group_of_input)
