"""The seam between a decoder and the storage of its matrices.

A decoder asks for one `LinearMethod` a layer and gives it a `LinearSpec`. `declare` names the checkpoint's tensors;
`repack` turns them, once, into what `apply` multiplies with.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pagedcore.quant.cpu import pack, packed_linear, packing_pays
from pagedcore.quant.stacked import in_order, stack
from pagedcore.quant.tensor_spec import TensorSpec
from pagedcore_kernels import linear


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

    @property
    def backend(self) -> str:
        """What multiplies: a name of `docs/quantization.md`. Known after `repack`."""
        ...

    @property
    def kind(self) -> Hashable:
        """Layers of one shape and one kind run the same kernels. Known after `repack`."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that the layer holds after `repack`."""
        ...

    @property
    def input_order(self) -> Tensor | None:
        """[in] int32, the checkpoint's input that each column of `apply`'s x must be; None: as they are numbered. Known after `repack`."""
        ...

    def declare(self) -> dict[str, TensorSpec]:
        """The tensors that the checkpoint must hold, by name. Changes nothing."""
        ...

    def repack(self, tensors: Mapping[str, Tensor], output_order: Tensor | None = None) -> None:
        """Take over the declared tensors: the layer can be applied from now on. Called once.

        With `output_order` [sum of out] int32, `apply` gives the outputs that it names, in that order.
        """
        ...

    def apply(self, x: Tensor) -> Tensor:
        """[T, in], its columns in `input_order`, -> [T, sum of out]."""
        ...


class DenseProduct:
    """Owns one plain matrix [out, in] and its bias, in the layout that the device multiplies fastest."""

    input_order: None = None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._bias = bias
        self._is_packed = packing_pays(weight)
        self._weight = pack(weight) if self._is_packed else weight
        self.kind: Hashable = (self._is_packed, bias is not None)

    def holds(self, weight: Tensor) -> bool:
        """Whether this very tensor is multiplied with, not a copy."""
        return self._weight is weight

    def apply(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        if self._is_packed:
            return packed_linear(x, self._weight, self._bias)
        return linear(x, self._weight, self._bias)


class UnquantizedLinear:
    """Owns one plain matrix: the specs' weights stacked."""

    backend = "torch"
    input_order: None = None

    def __init__(self, spec: LinearSpec) -> None:
        self._spec = spec
        self._product: DenseProduct | None = None

    @property
    def kind(self) -> Hashable:
        assert self._product is not None, "repack comes first"
        return self._product.kind

    @property
    def num_bytes(self) -> int:
        assert self._product is not None, "repack comes first"
        return self._product.num_bytes

    def declare(self) -> dict[str, TensorSpec]:
        specs: dict[str, TensorSpec] = {}
        for name, out_features in zip(self._spec.names, self._spec.out_features, strict=True):
            specs[f"{name}.weight"] = TensorSpec((out_features, self._spec.in_features))
            if self._spec.has_bias:
                specs[f"{name}.bias"] = TensorSpec((out_features,))
        return specs

    def repack(self, tensors: Mapping[str, Tensor], output_order: Tensor | None = None) -> None:
        weight = stack([tensors[f"{name}.weight"] for name in self._spec.names])
        bias = stack([tensors[f"{name}.bias"] for name in self._spec.names]) if self._spec.has_bias else None
        self._product = DenseProduct(in_order(weight, output_order), in_order(bias, output_order))

    def holds(self, weight: Tensor) -> bool:
        """Whether the layer multiplies with this very tensor: a tied head that was not copied."""
        return self._product is not None and self._product.holds(weight)

    def apply(self, x: Tensor) -> Tensor:
        assert self._product is not None, "repack comes first"
        return self._product.apply(x)
