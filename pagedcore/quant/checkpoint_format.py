"""The seam between what a checkpoint says of itself and how a matrix is read from its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from torch import Tensor

from pagedcore.quant.quantized_matrix import QuantizedMatrix
from pagedcore.quant.tensor_spec import TensorSpec


class PackedLayout(Protocol):
    """How the matrix of one module is stored."""

    @property
    def bits(self) -> int: ...

    @property
    def group_size(self) -> int | None:
        """Inputs that share a scale; None is all of an output's."""
        ...

    def declare(self, name: str, in_features: int, out_features: int, present: Collection[str] | None) -> dict[str, TensorSpec]:
        """The tensors of module `name`. `present` are all names in the checkpoint: an optional tensor is declared if it is there;
        with None (random weights) only what is needed is.

        Raises `CheckpointError`, naming module and sizes, for a matrix that the layout cannot hold.
        """
        ...

    def unpack(self, name: str, in_features: int, out_features: int, tensors: Mapping[str, Tensor]) -> QuantizedMatrix:
        """The matrix from the declared tensors. Raises `CheckpointError` where they contradict the layout."""
        ...


class CheckpointFormat(Protocol):
    """What a checkpoint says about its quantization."""

    @property
    def method(self) -> str:
        """gptq, awq or compressed-tensors."""
        ...

    @property
    def description(self) -> str:
        """For people and labels, such as `gptq 4-bit group 128`."""
        ...

    @property
    def packed_suffix(self) -> str:
        """A module is stored packed if the tensor `<module>.<suffix>` is in the checkpoint."""
        ...

    def layout_of(self, module: str) -> PackedLayout | None:
        """How this module is stored by the checkpoint's own rules; None if they leave it unquantized."""
        ...

    def default_layout(self) -> PackedLayout:
        """Layout of a module that is packed though no rule speaks of it (a quantized lm_head)."""
        ...
