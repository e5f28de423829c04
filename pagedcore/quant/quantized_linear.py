"""A linear layer whose matrices, or some of them, are stored as integers of a few bits."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagedcore.quant.checkpoint_format import PackedLayout
from pagedcore.quant.cpu_int4 import MAX_ROWS, Int4Product, int4_pays
from pagedcore.quant.linear import DenseProduct, LinearSpec
from pagedcore.quant.packed_product import PackedProduct, is_packed_on, stays_packed
from pagedcore.quant.quantized_matrix import QuantizedMatrix
from pagedcore.quant.stacked import in_order, stack, stack_quantized
from pagedcore.quant.tensor_spec import TensorSpec

DEQUANTIZED = "dequantized"
TORCH_INT4 = "torch-int4"


@dataclass(frozen=True, slots=True)
class _Part:
    """One module of the layer."""

    name: str
    out_features: int
    layout: PackedLayout | None
    """None: a plain matrix."""
    has_bias: bool


class _Product(Protocol):
    """What multiplies, made once from the layer's matrices."""

    num_bytes: int
    kind: Hashable

    @property
    def input_order(self) -> Tensor | None: ...

    def apply(self, x: Tensor) -> Tensor: ...


class QuantizedLinear:
    """Owns the layer's matrix, as the device multiplies it fastest: packed on a GPU that has kernels for it, else a copy dequantized
    once, and beside that the 4-bit form where that is faster for few rows.

    A module left in 16 bit may share the layer with packed ones: the layer is dense then. A bias that the checkpoint holds is added,
    whether the architecture has one or not: GPTQ tools have written biases for models without.
    """

    def __init__(
        self, spec: LinearSpec, layouts: Sequence[PackedLayout | None], *, dtype: torch.dtype, present: Collection[str] | None
    ) -> None:
        self._spec = spec
        self._dtype = dtype
        self._present = present
        self._parts = [
            _Part(name, out_features, layout, spec.has_bias or (present is not None and f"{name}.bias" in present))
            for name, out_features, layout in zip(spec.names, spec.out_features, layouts, strict=True)
        ]
        self._product: _Product | None = None
        self._int4: Int4Product | None = None
        self.backend = DEQUANTIZED

    @property
    def kind(self) -> Hashable:
        assert self._product is not None, "repack comes first"
        return self.backend, self._product.kind

    @property
    def num_bytes(self) -> int:
        assert self._product is not None, "repack comes first"
        return self._product.num_bytes + (0 if self._int4 is None else self._int4.num_bytes)

    @property
    def input_order(self) -> Tensor | None:
        assert self._product is not None, "repack comes first"
        return self._product.input_order

    def declare(self) -> dict[str, TensorSpec]:
        specs: dict[str, TensorSpec] = {}
        for part in self._parts:
            if part.layout is None:
                specs[f"{part.name}.weight"] = TensorSpec((part.out_features, self._spec.in_features))
            else:
                specs |= part.layout.declare(part.name, self._spec.in_features, part.out_features, self._present)
            if part.has_bias:
                specs[f"{part.name}.bias"] = TensorSpec((part.out_features,))
        return specs

    def repack(self, tensors: Mapping[str, Tensor], output_order: Tensor | None = None) -> None:
        matrices = [self._read(part, tensors) for part in self._parts]
        bias = in_order(self._bias(tensors), output_order)
        packed = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
        whole = stack_quantized(packed) if len(packed) == len(matrices) else None
        if whole is not None and is_packed_on(whole.codes.device, self._dtype) and stays_packed(whole):
            del matrices, packed  # each copy of the codes takes twice what is packed of them
            whole = whole.with_outputs(output_order)
            self._product = product = PackedProduct(whole, bias)
            self.backend = product.backend
            return
        dense = [matrix if isinstance(matrix, Tensor) else matrix.dequantize(self._dtype) for matrix in matrices]
        self._product = DenseProduct(in_order(stack(dense), output_order), bias)
        if whole is not None and int4_pays(whole, self._dtype):
            self._int4 = Int4Product(whole.with_outputs(output_order), bias)
            self.backend = TORCH_INT4

    def apply(self, x: Tensor) -> Tensor:
        assert self._product is not None, "repack comes first"
        if self._int4 is not None and x.shape[0] <= MAX_ROWS:
            return self._int4.apply(x)
        return self._product.apply(x)

    def _read(self, part: _Part, tensors: Mapping[str, Tensor]) -> Tensor | QuantizedMatrix:
        if part.layout is None:
            return tensors[f"{part.name}.weight"]
        return part.layout.unpack(part.name, self._spec.in_features, part.out_features, tensors)

    def _bias(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """[sum of out], zero for parts without; None if all is zero."""
        present = [part for part in self._parts if part.has_bias and bool(tensors[f"{part.name}.bias"].any())]
        if not present:
            return None
        device = tensors[f"{present[0].name}.bias"].device
        zeros = [torch.zeros(part.out_features, dtype=self._dtype, device=device) for part in self._parts]
        return stack([tensors[f"{part.name}.bias"] if part.has_bias else zero for part, zero in zip(self._parts, zeros, strict=True)])
