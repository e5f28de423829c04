"""Products on a GPU with weights that stay packed."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from pagedcore.quant.quantized_matrix import QuantizedMatrix
from pagedcore_kernels.dispatch import packed_linear, reads_packed_weights
from pagedcore_kernels.packed_weights import BITS, holds_groups_of, pack_weights

_DTYPES = (torch.float16, torch.bfloat16)


class PackedProduct:
    """Owns one matrix in the layout that the kernels read, which want its inputs in the order of their groups."""

    def __init__(self, matrix: QuantizedMatrix, bias: Tensor | None) -> None:
        assert stays_packed(matrix), "the layout must be one that the kernels read"
        groups = matrix.group_of_input
        self.input_order = None if groups is None else groups.argsort(stable=True).int()
        codes = matrix.codes if self.input_order is None else matrix.codes.index_select(1, self.input_order)
        self._packed = packed = pack_weights(codes, matrix.scales, matrix.zeros, bits=matrix.bits)
        self._bias = bias
        self.backend = f"triton-w{matrix.bits}a16"
        self.kind: Hashable = (
            packed.bits,
            packed.group_size,
            packed.slice_size,
            packed.uniform_zero,
            bias is not None,
            self.input_order is not None,
        )
        self.num_bytes = packed.num_bytes + sum(part.nbytes for part in (self.input_order, bias) if part is not None)

    def apply(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], both float16 or bfloat16; x has its inputs in `input_order`."""
        return packed_linear(x, self._packed, self._bias)


def is_packed_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels on `device` multiply activations of `dtype` with packed weights."""
    return dtype in _DTYPES and reads_packed_weights(device)


def stays_packed(matrix: QuantizedMatrix) -> bool:
    """Whether the kernels' layout holds this matrix."""
    if matrix.bits not in BITS:
        return False
    return matrix.num_groups == 1 or (matrix.has_equal_groups and holds_groups_of(matrix.group_size))
