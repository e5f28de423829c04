"""What an AWQ checkpoint says of itself: the keys that AutoAWQ, transformers and GPTQModel write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagedcore.quant.awq_layout import BITS, AwqGemmLayout, AwqGemvLayout, AwqLayout
from pagedcore.quant.checkpoint_settings import CheckpointSettings
from pagedcore.quant.groups import read_group_size
from pagedcore.quant.module_rules import DynamicRule, ends_in_components, holds_components, read_dynamic_rules

_BITS_KEYS = ("bits", "w_bit")
_GROUP_SIZE_KEYS = ("group_size", "q_group_size")
_LAYOUTS: dict[str, Callable[[int | None, bool], AwqLayout]] = {"gemm": AwqGemmLayout, "gemv": AwqGemvLayout}


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """The layout of most modules and the rules for the others."""

    layout: AwqLayout
    unconverted: tuple[str, ...]
    """Rules of modules left unquantized: a name, or a run of its dotted components."""
    dynamic: tuple[tuple[DynamicRule, AwqLayout | None], ...]
    """The first that matches decides; None: unquantized."""
    has_packed_head: bool

    method = "awq"
    packed_suffix = "qweight"

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], where: str) -> AwqFormat:
        """Raises `CheckpointError`, naming key, value and file, for what is malformed or not covered."""
        reader = CheckpointSettings(settings, where)
        scheme = _read_scheme(reader, _Scheme())
        return cls(
            layout=scheme.layout(),
            unconverted=reader.names("modules_to_not_convert"),
            dynamic=tuple((rule, _layout_of_rule(rule, scheme, where)) for rule in read_dynamic_rules(settings.get("dynamic"), where)),
            has_packed_head=reader.flag("lm_head", default=False),
        )

    @property
    def description(self) -> str:
        return self.layout.description

    def layout_of(self, module: str) -> AwqLayout | None:
        is_head = ends_in_components(module, "lm_head")
        if (is_head and not self.has_packed_head) or any(holds_components(module, rule) for rule in self.unconverted):
            return None
        return next((layout for rule, layout in self.dynamic if rule.matches(module)), self.layout)

    def default_layout(self) -> AwqLayout:
        return self.layout


@dataclass(frozen=True, slots=True)
class _Scheme:
    """Settings of a module, with AutoAWQ's defaults."""

    version: str = "gemm"
    group_size: int | None = 128
    has_zeros: bool = True

    def layout(self) -> AwqLayout:
        return _LAYOUTS[self.version](self.group_size, self.has_zeros)


def _read_scheme(reader: CheckpointSettings, base: _Scheme) -> _Scheme:
    """What `reader` says, and `base` where it says nothing."""
    bits = reader.integer(*_BITS_KEYS, default=BITS)
    if bits != BITS:
        raise reader.refusal(reader.given(*_BITS_KEYS), bits, f"awq is covered with {BITS} bits")
    if reader.flag("desc_act", default=False):
        raise reader.refusal("desc_act", True, "awq has no act-order")
    reader.flag("sym", default=False)  # steered the quantizing only: zeros are followed as stored
    if reader.text("backend", default="autoawq") == "llm-awq":
        raise reader.refusal("backend", reader.value("backend"), "its packing is not covered; that of autoawq is")
    reader.choice("method", "quant_method", covered=("awq",), default="awq")
    reader.choice("pack_dtype", covered=("int32",), default="int32")
    return _Scheme(
        version=reader.choice("version", "checkpoint_format", "format", covered=tuple(_LAYOUTS), default=base.version),
        group_size=read_group_size(reader, *_GROUP_SIZE_KEYS, default=base.group_size),
        has_zeros=reader.flag("zero_point", default=base.has_zeros),
    )


def _layout_of_rule(rule: DynamicRule, scheme: _Scheme, where: str) -> AwqLayout | None:
    if rule.overrides is None:
        return None
    return _read_scheme(CheckpointSettings(rule.overrides, where, f"dynamic {rule.pattern.pattern}: "), scheme).layout()
