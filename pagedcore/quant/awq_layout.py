"""How AWQ stores one matrix: 4-bit integers with a zero point for each group, in the orders that AutoAWQ's kernels read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcore.errors import CheckpointError
from pagedcore.quant.bit_packing import num_words, unpack_bits
from pagedcore.quant.dummy_tensors import constant_scales, random_words
from pagedcore.quant.groups import count_groups, group_label
from pagedcore.quant.quantized_matrix import QuantizedMatrix
from pagedcore.quant.tensor_spec import TensorSpec

BITS = 4
_PER_WORD = 8
_MIDDLE = 8
"""The zero of a matrix that stores none."""
_GEMM_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, of a word's eight, in each nibble from the lowest."""
_NIBBLE_OF_COLUMN = [_GEMM_ORDER.index(column) for column in range(_PER_WORD)]
_GEMV_PADDING = {32: 4, 64: 2}
"""Words of zeros come in multiples of this, by group size; in ones from 128 inputs a group on."""
_GEMV_MIN_UNPADDED = 128


@dataclass(frozen=True, slots=True)
class AwqGemmLayout:
    """Packed along the output, interleaved.

    Nibble i of a word c of `qweight` [in, out / 8] and of `qzeros` [groups, out / 8] is column 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i].
    `scales` is [groups, out]. Zeros are stored as they are.
    """

    group_size: int | None
    """None: one group of all inputs."""
    has_zeros: bool = True
    """Whether `qzeros` must be there; if not, and it is not, all zeros are 8."""

    @property
    def bits(self) -> int:
        return BITS

    @property
    def description(self) -> str:
        return f"awq {BITS}-bit {group_label(self.group_size)} gemm"

    def declare(self, name: str, in_features: int, out_features: int, present: Collection[str] | None) -> dict[str, TensorSpec]:
        groups = count_groups(name, in_features, out_features, self.group_size)
        words = num_words(out_features, BITS)
        sizes = _Sizes(qweight=(in_features, words), qzeros=(groups, words), scales=(groups, out_features))
        return _declare(name, sizes, self.has_zeros, present, self.description)

    def unpack(self, name: str, in_features: int, out_features: int, tensors: Mapping[str, Tensor]) -> QuantizedMatrix:
        groups = count_groups(name, in_features, out_features, self.group_size)
        zeros = tensors.get(f"{name}.qzeros")
        return QuantizedMatrix(
            codes=_unpack_interleaved(tensors[f"{name}.qweight"], out_features),
            scales=tensors[f"{name}.scales"].T.contiguous(),
            zeros=_middle(out_features, groups, tensors[f"{name}.scales"]) if zeros is None else _unpack_interleaved(zeros, out_features),
            bits=BITS,
        )


@dataclass(frozen=True, slots=True)
class AwqGemvLayout:
    """Packed along the input, in plain order: nibble i of a word c holds input, or group, 8 c + i.

    `qweight` is [out, in / 8], `qzeros` [out, words], `scales` [out, 8 words]; words are rounded up from the number of groups, and
    the places beyond it are filling. Zeros are stored as they are.
    """

    group_size: int | None
    """None: one group of all inputs."""
    has_zeros: bool = True
    """Whether `qzeros` must be there; if not, and it is not, all zeros are 8."""

    @property
    def bits(self) -> int:
        return BITS

    @property
    def description(self) -> str:
        return f"awq {BITS}-bit {group_label(self.group_size)} gemv"

    def declare(self, name: str, in_features: int, out_features: int, present: Collection[str] | None) -> dict[str, TensorSpec]:
        groups = count_groups(name, in_features, out_features, self.group_size)
        words = _num_padded_words(name, groups, in_features // groups)
        sizes = _Sizes(
            qweight=(out_features, num_words(in_features, BITS)),
            qzeros=(out_features, words),
            scales=(out_features, words * _PER_WORD),
        )
        return _declare(name, sizes, self.has_zeros, present, self.description)

    def unpack(self, name: str, in_features: int, out_features: int, tensors: Mapping[str, Tensor]) -> QuantizedMatrix:
        groups = count_groups(name, in_features, out_features, self.group_size)
        stored_scales, zeros = tensors[f"{name}.scales"], tensors.get(f"{name}.qzeros")
        return QuantizedMatrix(
            codes=unpack_bits(tensors[f"{name}.qweight"], BITS, in_features, dim=1),
            scales=stored_scales[:, :groups].contiguous(),
            zeros=_middle(out_features, groups, stored_scales) if zeros is None else unpack_bits(zeros, BITS, groups, dim=1),
            bits=BITS,
        )


AwqLayout = AwqGemmLayout | AwqGemvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    qweight: tuple[int, int]
    qzeros: tuple[int, int]
    scales: tuple[int, int]


def _declare(name: str, sizes: _Sizes, has_zeros: bool, present: Collection[str] | None, reason: str) -> dict[str, TensorSpec]:
    stores_zeros = has_zeros or (present is not None and f"{name}.qzeros" in present)
    specs = {f"{name}.qweight": TensorSpec(sizes.qweight, torch.int32, reason, dummy=random_words(*sizes.qweight))}
    if stores_zeros:
        specs[f"{name}.qzeros"] = TensorSpec(sizes.qzeros, torch.int32, reason, dummy=random_words(*sizes.qzeros))
    dummy_scales = constant_scales(*sizes.scales, bits=BITS, has_random_zeros=stores_zeros)
    specs[f"{name}.scales"] = TensorSpec(sizes.scales, torch.float32, reason, dummy=dummy_scales)
    return specs


def _unpack_interleaved(words: Tensor, out_features: int) -> Tensor:
    """[rows, out / 8] int32 to [out, rows] uint8."""
    nibbles = unpack_bits(words, BITS, words.shape[1] * _PER_WORD, dim=1)
    columns = nibbles.view(len(words), -1, _PER_WORD)[:, :, _NIBBLE_OF_COLUMN].flatten(1)
    return columns[:, :out_features].T.contiguous()


def _middle(out_features: int, groups: int, like: Tensor) -> Tensor:
    return torch.full((out_features, groups), _MIDDLE, dtype=torch.uint8, device=like.device)


def _num_padded_words(name: str, groups: int, group_size: int) -> int:
    multiple = 1 if group_size >= _GEMV_MIN_UNPADDED else _GEMV_PADDING.get(group_size)
    if multiple is None:
        raise CheckpointError(
            f"{name} is stored as awq gemv in groups of {group_size} inputs, and gemv has groups of 32, 64, or 128 and more; "
            "use a checkpoint in the gemm version."
        )
    return -(-num_words(groups, BITS) // multiple) * multiple
