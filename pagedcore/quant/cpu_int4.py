"""torch's own product with 4-bit weights on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedcore.quant.cpu import cpu_has_bf16_units, is_x86
from pagedcore.quant.quantized_matrix import QuantizedMatrix

MAX_ROWS = 3
"""Measured beside the product with a dense copy: 1.5 to 1.9 times as fast for 1 row, 0.8 to 1.2 for 4, 0.5 to 0.7 for 8."""
_GROUP_SIZES = (32, 64, 128, 256)
_OUT_MULTIPLE = 16
_MIDDLE = 8
"""The operator's zero point: it multiplies with (code - 8) * scale + offset."""


class Int4Product:
    """Owns one 4-bit matrix in the operator's layout: two codes a byte, scale and offset of each group in bfloat16."""

    def __init__(self, matrix: QuantizedMatrix, bias: Tensor | None) -> None:
        assert int4_pays(matrix, torch.bfloat16), "the layout must be one that the operator takes"
        groups = matrix.group_of_input
        self._order = None if groups is None else groups.argsort(stable=True)
        codes = matrix.codes if self._order is None else matrix.codes.index_select(1, self._order)
        self._group_size = matrix.group_size
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)  # noqa: SLF001 (named so by torch)
        offsets = (_MIDDLE - matrix.zeros.float()) * matrix.scales
        self._scales = torch.stack((matrix.scales, offsets), dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()  # [G, out, 2]
        self._bias = bias
        self.num_bytes = sum(part.nbytes for part in (self._codes, self._scales, self._order) if part is not None)

    def apply(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], both bfloat16."""
        ordered = x if self._order is None else x.index_select(1, self._order)
        result = torch.ops.aten._weight_int4pack_mm_for_cpu(ordered.contiguous(), self._codes, self._group_size, self._scales)  # noqa: SLF001
        return result if self._bias is None else result.add_(self._bias)


def int4_pays(matrix: QuantizedMatrix, dtype: torch.dtype) -> bool:
    """Whether the operator takes this matrix, and is faster here than a dense product for few rows: in bfloat16 alone. In float32 and
    float16 it computes one number at a time, 10 to 100 x slower than the dense product.
    """
    if matrix.codes.device.type != "cpu" or dtype != torch.bfloat16 or not has_fast_int4():
        return False
    fits = matrix.bits == 4 and matrix.out_features % _OUT_MULTIPLE == 0 and matrix.has_equal_groups
    return fits and matrix.group_size in _GROUP_SIZES


def has_fast_int4() -> bool:
    """Whether this CPU multiplies 4-bit weights with bfloat16 faster than dense ones: x86 with bf16 units, where it was measured."""
    return is_x86() and _has_operator() and cpu_has_bf16_units()


def _has_operator() -> bool:
    return hasattr(torch.ops.aten, "_convert_weight_to_int4pack_for_cpu") and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
