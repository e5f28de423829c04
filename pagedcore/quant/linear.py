"""The seam between a decoder and the storage of its matrices.

A decoder asks for one `LinearMethod` a layer and gives it a `LinearSpec`. `declare` names the checkpoint's tensors;
`repack` turns them, once, into what `apply` multiplies with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedcore.quant.cpu import pack, packed_linear, packing_pays

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """Matrices of a checkpoint that share their input and are multiplied as one, stacked by output."""

    names: tuple[str, ...]
    """Module names in the checkpoint, such as `model.layers.0.self_attn.q_proj`."""
    in_features: int
    out_features: tuple[int, ...]
    """One a name."""
    has_bias: bool = False


class LinearMethod(Protocol):
    """One linear layer in one storage format."""

    def declare(self) -> dict[str, Shape]:
        """Name and shape of each tensor that the checkpoint must hold. Changes nothing."""
        ...

    def repack(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the declared tensors: the layer can be applied from now on. Called once."""
        ...

    def apply(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, sum of out]."""
        ...


class UnquantizedLinear:
    """Owns one plain matrix: the specs' weights stacked, in the layout that the device multiplies fastest."""

    def __init__(self, spec: LinearSpec) -> None:
        self._spec = spec
        self._weight = torch.empty(0)
        self._bias: Tensor | None = None
        self._packed = False

    def declare(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for name, out_features in zip(self._spec.names, self._spec.out_features, strict=True):
            shapes[f"{name}.weight"] = (out_features, self._spec.in_features)
            if self._spec.has_bias:
                shapes[f"{name}.bias"] = (out_features,)
        return shapes

    def repack(self, tensors: Mapping[str, Tensor]) -> None:
        weight = _stack([tensors[f"{name}.weight"] for name in self._spec.names])
        if self._spec.has_bias:
            self._bias = _stack([tensors[f"{name}.bias"] for name in self._spec.names])
        self._packed = packing_pays(weight)
        self._weight = pack(weight) if self._packed else weight

    def holds(self, weight: Tensor) -> bool:
        """Whether the layer multiplies with this very tensor: a tied head that was not copied."""
        return self._weight is weight

    def apply(self, x: Tensor) -> Tensor:
        if self._packed:
            return packed_linear(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
