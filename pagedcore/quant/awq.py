"""AWQ checkpoints: 4-bit integers with a zero point for each group, in the orders that AutoAWQ's kernels read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagedcore.errors import CheckpointError
from pagedcore.quant.bit_packing import num_words, unpack_bits
from pagedcore.quant.checkpoint_format import PackedLayout
from pagedcore.quant.checkpoint_settings import CheckpointSettings
from pagedcore.quant.dummy_tensors import random_words, scales
from pagedcore.quant.groups import count_groups, group_label
from pagedcore.quant.module_rules import DynamicRule, holds_components, read_dynamic_rules
from pagedcore.quant.quantized_matrix import QuantizedMatrix
from pagedcore.quant.tensor_spec import TensorSpec

_BITS = 4
_BITS_KEYS = ("bits", "w_bit")
_GROUP_SIZE_KEYS = ("group_size", "q_group_size")
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

    def declare(self, name: str, in_features: int, out_features: int, present: Collection[str] | None) -> dict[str, TensorSpec]:
        groups = count_groups(name, in_features, out_features, self.group_size)
        words = num_words(out_features, _BITS)
        sizes = _Sizes(qweight=(in_features, words), qzeros=(groups, words), scales=(groups, out_features))
        return _declare(name, sizes, self.has_zeros, present, f"4-bit awq gemm with {group_label(self.group_size)}")

    def unpack(self, name: str, in_features: int, out_features: int, tensors: Mapping[str, Tensor]) -> QuantizedMatrix:
        groups = count_groups(name, in_features, out_features, self.group_size)
        zeros = tensors.get(f"{name}.qzeros")
        return QuantizedMatrix(
            codes=_unpack_interleaved(tensors[f"{name}.qweight"], out_features),
            scales=tensors[f"{name}.scales"].T.contiguous(),
            zeros=_middle(out_features, groups, tensors[f"{name}.scales"]) if zeros is None else _unpack_interleaved(zeros, out_features),
            bits=_BITS,
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

    def declare(self, name: str, in_features: int, out_features: int, present: Collection[str] | None) -> dict[str, TensorSpec]:
        groups = count_groups(name, in_features, out_features, self.group_size)
        words = _num_padded_words(name, groups, in_features // groups)
        sizes = _Sizes(
            qweight=(out_features, num_words(in_features, _BITS)),
            qzeros=(out_features, words),
            scales=(out_features, words * _PER_WORD),
        )
        return _declare(name, sizes, self.has_zeros, present, f"4-bit awq gemv with {group_label(self.group_size)}")

    def unpack(self, name: str, in_features: int, out_features: int, tensors: Mapping[str, Tensor]) -> QuantizedMatrix:
        groups = count_groups(name, in_features, out_features, self.group_size)
        stored_scales, zeros = tensors[f"{name}.scales"], tensors.get(f"{name}.qzeros")
        return QuantizedMatrix(
            codes=unpack_bits(tensors[f"{name}.qweight"], _BITS, in_features, dim=1),
            scales=stored_scales[:, :groups].contiguous(),
            zeros=_middle(out_features, groups, stored_scales) if zeros is None else unpack_bits(zeros, _BITS, groups, dim=1),
            bits=_BITS,
        )


_LAYOUTS: dict[str, Callable[[int | None, bool], PackedLayout]] = {"gemm": AwqGemmLayout, "gemv": AwqGemvLayout}


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """What an AWQ checkpoint says of itself: the keys that AutoAWQ, transformers and GPTQModel write."""

    description: str
    layout: PackedLayout
    unconverted: tuple[str, ...]
    """Rules of modules left unquantized: a name, or a run of its dotted components."""
    dynamic: tuple[tuple[DynamicRule, PackedLayout | None], ...]
    has_packed_head: bool

    method = "awq"
    packed_suffix = "qweight"

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], where: str) -> AwqFormat:
        """Raises `CheckpointError`, naming key, value and file, for what is malformed or not covered."""
        reader = CheckpointSettings(settings, where)
        scheme = _read_scheme(reader, _Scheme())
        return cls(
            description=f"awq {_BITS}-bit {group_label(scheme.group_size)} {scheme.version}",
            layout=scheme.layout(),
            unconverted=reader.names("modules_to_not_convert"),
            dynamic=tuple((rule, _layout_of_rule(rule, scheme, where)) for rule in read_dynamic_rules(settings.get("dynamic"), where)),
            has_packed_head=reader.flag("lm_head", default=False),
        )

    def layout_of(self, module: str) -> PackedLayout | None:
        is_head = module.rpartition(".")[2] == "lm_head"
        if (is_head and not self.has_packed_head) or any(holds_components(module, rule) for rule in self.unconverted):
            return None
        return next((layout for rule, layout in self.dynamic if rule.matches(module)), self.layout)

    def default_layout(self) -> PackedLayout:
        return self.layout


@dataclass(frozen=True, slots=True)
class _Scheme:
    """Settings of a module, with AutoAWQ's defaults."""

    version: str = "gemm"
    group_size: int | None = 128
    has_zeros: bool = True

    def layout(self) -> PackedLayout:
        return _LAYOUTS[self.version](self.group_size, self.has_zeros)


def _read_scheme(reader: CheckpointSettings, base: _Scheme) -> _Scheme:
    """What `reader` says, and `base` where it says nothing."""
    bits = reader.integer(*_BITS_KEYS, default=_BITS)
    if bits != _BITS:
        raise reader.refusal(reader.given(*_BITS_KEYS), bits, f"awq is covered with {_BITS} bits")
    if reader.flag("desc_act", default=False):
        raise reader.refusal("desc_act", True, "awq has no act-order")
    reader.flag("sym", default=False)
    if reader.text("backend", default="autoawq") == "llm-awq":
        raise reader.refusal("backend", reader.value("backend"), "its packing is not covered; that of autoawq is")
    reader.choice("method", "quant_method", covered=("awq",), default="awq")
    reader.choice("pack_dtype", covered=("int32",), default="int32")
    version = reader.choice("version", "checkpoint_format", "format", covered=tuple(_LAYOUTS), default=base.version)
    return _Scheme(version, _read_group_size(reader, base.group_size), reader.flag("zero_point", default=base.has_zeros))


def _read_group_size(reader: CheckpointSettings, default: int | None) -> int | None:
    size = reader.integer(*_GROUP_SIZE_KEYS, default=-1 if default is None else default)
    if size != -1 and size < 1:
        raise reader.refusal(reader.given(*_GROUP_SIZE_KEYS), size, "must be positive, or -1 for one group of all inputs")
    return None if size == -1 else size


def _layout_of_rule(rule: DynamicRule, scheme: _Scheme, where: str) -> PackedLayout | None:
    if rule.overrides is None:
        return None
    return _read_scheme(CheckpointSettings(rule.overrides, where, f"dynamic {rule.pattern.pattern}: "), scheme).layout()


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
    dummy_scales = scales(*sizes.scales, bits=_BITS, has_random_zeros=stores_zeros)
    specs[f"{name}.scales"] = TensorSpec(sizes.scales, torch.float32, reason, dummy=dummy_scales)
    return specs


def _unpack_interleaved(words: Tensor, out_features: int) -> Tensor:
    """[rows, out / 8] int32 to [out, rows] uint8."""
    nibbles = unpack_bits(words, _BITS, words.shape[1] * _PER_WORD, dim=1)
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
    return -(-num_words(groups, _BITS) // multiple) * multiple
