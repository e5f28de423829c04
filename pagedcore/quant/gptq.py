"""What a GPTQ checkpoint says of itself: the keys that AutoGPTQ, transformers and GPTQModel write."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedcore.quant.checkpoint_settings import CheckpointSettings
from pagedcore.quant.gptq_layout import GptqLayout
from pagedcore.quant.gptq_zeros import ZeroStorage
from pagedcore.quant.groups import read_group_size
from pagedcore.quant.module_rules import DynamicRule, ends_in_components, holds_components, read_dynamic_rules

_BITS = (2, 3, 4, 8)
_BITS_KEYS = ("bits", "w_bit", "wbits")
_GROUP_SIZE_KEYS = ("group_size", "q_group_size")
_STORAGES = {"gptq": ZeroStorage.MINUS_ONE, "gptq_v2": ZeroStorage.AS_IS}
_FORMAT_KEYS = ("format", "checkpoint_format")
_OF_THE_WHOLE_FILE = frozenset({*_FORMAT_KEYS, "is_marlin_format", "lm_head", "method", "quant_method", "w_bit", "wbits", "q_group_size"})
_QUANTIZER = re.compile(r"gptqmodel:(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqFormat:
    """The layout of most modules and the rules for the others."""

    layout: GptqLayout
    has_packed_head: bool = False
    unconverted: tuple[str, ...] = ()
    """Rules of modules left unquantized: a name, or a run of its dotted components."""
    names_in_block: tuple[str, ...] = ()
    """If any: the only modules that are quantized, by the ends of their names."""
    dynamic: tuple[tuple[DynamicRule, GptqLayout | None], ...] = ()
    """The first that matches decides; None: unquantized."""

    method = "gptq"
    packed_suffix = "qweight"

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], where: str) -> GptqFormat:
        """Reads quantization_config or quantize_config.json. Keys that only steered the quantizing are left alone.

        Raises `CheckpointError`, naming key, value and the file `where`, for what is malformed or not covered.
        """
        reader = CheckpointSettings(settings, where)
        rules = read_dynamic_rules(settings.get("dynamic"), where)
        return cls(
            layout=_read_layout(settings, where),
            has_packed_head=reader.flag("lm_head", default=False),
            unconverted=reader.names("modules_to_not_convert"),
            names_in_block=_read_names(settings, "modules_in_block_to_quantize", where)
            or _read_names(settings, "inside_layer_modules", where),
            dynamic=tuple((rule, _layout_of_rule(rule, settings, where)) for rule in rules),
        )

    @property
    def description(self) -> str:
        mixed = any(layout is not None and layout.description != self.layout.description for _, layout in self.dynamic)
        return f"{self.layout.description}{' with exceptions' if mixed else ''}"

    def layout_of(self, module: str) -> GptqLayout | None:
        if not self._is_quantized(module):
            return None
        return next((layout for rule, layout in self.dynamic if rule.matches(module)), self.layout)

    def default_layout(self) -> GptqLayout:
        return self.layout

    def _is_quantized(self, module: str) -> bool:
        """By the rules that name no layout."""
        if any(holds_components(module, name) for name in self.unconverted):
            return False
        if ends_in_components(module, "lm_head"):
            return self.has_packed_head
        return not self.names_in_block or any(ends_in_components(module, name) for name in self.names_in_block)


def _read_layout(settings: Mapping[str, Any], where: str, path: str = "") -> GptqLayout:
    reader = CheckpointSettings(settings, where, path)
    for keys in (_BITS_KEYS, _GROUP_SIZE_KEYS):
        _require_one(reader, keys)
    bits = reader.integer(*_BITS_KEYS, default=0)
    if bits not in _BITS:
        raise reader.refusal(reader.given(*_BITS_KEYS), bits, "gptq is covered with 2, 3, 4 and 8 bits")
    reader.choice("pack_dtype", covered=("int32",), default="int32")
    return GptqLayout(
        bits=bits,
        group_size=read_group_size(reader, *_GROUP_SIZE_KEYS, default=None),
        has_act_order=reader.flag("desc_act", default=False),
        is_symmetric=None if reader.value("sym") is None else reader.flag("sym", default=False),
        zero_storage=_read_zero_storage(reader, bits),
        where=where,
    )


def _require_one(reader: CheckpointSettings, keys: Sequence[str]) -> None:
    """No default is safe: tools differ in theirs."""
    if all(reader.value(key) is None for key in keys):
        raise reader.refusal(keys[0], None, "must be given: without it packed tensors cannot be read")


def _read_zero_storage(reader: CheckpointSettings, bits: int) -> ZeroStorage:
    """By the label, and for 3 bits by the writer: GPTQModel before 7.0 stored v1 its own way."""
    if reader.flag("is_marlin_format", default=False):
        raise reader.refusal("is_marlin_format", True, f"the formats covered are {' and '.join(_STORAGES)}")
    storage = _STORAGES[reader.choice(*_FORMAT_KEYS, covered=tuple(_STORAGES), default="gptq")]
    if storage is ZeroStorage.MINUS_ONE and bits == 3 and _is_by_gptqmodel_before_7(reader.value("meta")):
        return ZeroStorage.SHIFTED_3_BIT
    return storage


def _is_by_gptqmodel_before_7(meta: object) -> bool:
    """`meta` may list the tools that wrote the file, such as gptqmodel:5.6.0."""
    quantizers = meta.get("quantizer") if isinstance(meta, dict) else None
    found = [_QUANTIZER.match(str(quantizer)) for quantizer in (quantizers if isinstance(quantizers, list) else [quantizers])]
    return any(match is not None and int(match[1]) < 7 for match in found)


def _read_names(settings: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """A list of names, or of lists of them."""
    value = settings.get(key)
    if isinstance(value, list):
        value = [name for item in value for name in (item if isinstance(item, list) else [item])]
    return CheckpointSettings({key: value}, where).names(key)


def _layout_of_rule(rule: DynamicRule, settings: Mapping[str, Any], where: str) -> GptqLayout | None:
    """Overrides that only steered the quantizing are left alone."""
    if rule.overrides is None:
        return None
    path = f"dynamic {rule.pattern.pattern}: "
    for key in sorted(_OF_THE_WHOLE_FILE & rule.overrides.keys()):
        raise CheckpointSettings(rule.overrides, where, path).refusal(key, rule.overrides[key], "holds for the whole file only")
    return _read_layout({**settings, **rule.overrides}, where, path)
