"""compressed-tensors checkpoints whose weights alone are quantized: `pack-quantized`, W4A16 and W8A16."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedcore.quant.checkpoint_format import PackedLayout
from pagedcore.quant.checkpoint_settings import CheckpointSettings
from pagedcore.quant.compressed_tensors_layout import PackQuantizedLayout

_FORMAT = "pack-quantized"
_MIXED = "mixed-precision"
_BITS = (2, 3, 4, 8)
_PACKED_STATUSES = ("compressed", "frozen")
"""Old tools wrote `frozen` beside packed tensors."""
_NO_GROUPS = -1
"""The group_size of one scale a channel."""
_MODULE_CLASS = "Linear"
_REGEX = "re:"
_REORDERED = (True, "group", "dynamic")
"""Values of `actorder` with which `weight_g_idx` tells the group of each input."""
_IN_ORDER = (None, False, "weight", "static")


@dataclass(frozen=True, slots=True)
class ModuleTarget:
    """What an entry of `targets` or `ignore` names: a module, modules that a regular expression matches from the start, or a class."""

    text: str
    pattern: re.Pattern[str] | None = None

    @classmethod
    def read(cls, text: str, key: str, reader: CheckpointSettings) -> ModuleTarget:
        """Raises `CheckpointError`, naming `key`, for a malformed regular expression."""
        if not text.startswith(_REGEX):
            return cls(text)
        return cls(text, reader.pattern(key, text, text.removeprefix(_REGEX)))

    def names(self, module: str) -> bool:
        """Whether the entry is about the module by its name."""
        return self.text == module if self.pattern is None else self.pattern.match(module) is not None

    @property
    def names_every_linear(self) -> bool:
        return self.text == _MODULE_CLASS


@dataclass(frozen=True, slots=True)
class CompressedTensorsFormat:
    """What a compressed-tensors checkpoint says of itself."""

    targets: tuple[tuple[ModuleTarget, PackQuantizedLayout], ...]
    """In the order in which compressed-tensors asks: names, then regular expressions, each in order of their text."""
    ignored: tuple[ModuleTarget, ...]

    method = "compressed-tensors"
    packed_suffix = "weight_packed"

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], where: str) -> CompressedTensorsFormat:
        """Raises `CheckpointError`, naming key, value and file, for what is malformed or not covered."""
        reader = CheckpointSettings(settings, where)
        _refuse_what_is_not_covered(reader)
        layouts = _read_groups(reader)
        if not layouts:
            raise reader.refusal("config_groups", settings.get("config_groups"), "must name at least one module that is quantized")
        texts = sorted(layouts, key=lambda text: (text.startswith(_REGEX), text))
        return cls(
            targets=tuple((ModuleTarget.read(text, "targets", reader), layouts[text]) for text in texts),
            ignored=tuple(ModuleTarget.read(text, "ignore", reader) for text in reader.names("ignore")),
        )

    @property
    def description(self) -> str:
        return f"{self.method} {' + '.join(dict.fromkeys(layout.description for _, layout in self.targets))}"

    def layout_of(self, module: str) -> PackedLayout | None:
        if any(target.names(module) or target.names_every_linear for target in self.ignored):
            return None
        by_name = (layout for target, layout in self.targets if target.names(module))
        return next(by_name, None) or next((layout for target, layout in self.targets if target.names_every_linear), None)

    def default_layout(self) -> PackedLayout:
        return self.targets[0][1]


def _refuse_what_is_not_covered(reader: CheckpointSettings) -> None:
    reader.choice("format", covered=(_FORMAT, _MIXED), default=None)
    reader.choice("quantization_status", covered=_PACKED_STATUSES, default=_PACKED_STATUSES[0])
    reader.refuse_given("kv_cache_scheme", "a quantized KV cache is not covered")
    reader.section("sparsity_config").choice("format", covered=("dense",), default="dense")
    reader.refuse_given("transform_config", "transformed activations are not covered")


def _read_groups(reader: CheckpointSettings) -> dict[str, PackQuantizedLayout]:
    """Layout by target; of groups with the same target the last counts."""
    is_mixed = reader.text("format", default=_FORMAT) == _MIXED
    layouts: dict[str, PackQuantizedLayout] = {}
    for _, group in reader.section("config_groups").sections():
        layout = _read_group(group, is_mixed)
        layouts |= dict.fromkeys(group.names("targets"), layout)
    return layouts


def _read_group(group: CheckpointSettings, is_mixed: bool) -> PackQuantizedLayout:
    group.choice("format", covered=(_FORMAT,), default=None if is_mixed else _FORMAT)
    for key in ("input_activations", "output_activations"):
        group.refuse_given(key, "quantized activations are not covered: use a W4A16 or W8A16 checkpoint")
    if group.value("weights") is None:
        raise group.refusal("weights", None, "a group that quantizes no weights is not covered")
    return _read_weights(group.section("weights"))


def _read_weights(weights: CheckpointSettings) -> PackQuantizedLayout:
    bits = weights.integer("num_bits", default=8)
    if bits not in _BITS:
        raise weights.refusal("num_bits", bits, f"weights are covered with {', '.join(map(str, _BITS))} bits")
    weights.choice("type", covered=("int",), default="int")
    weights.refuse_given("block_structure", "weights in blocks are not covered")
    if weights.flag("dynamic", default=False):
        raise weights.refusal("dynamic", True, "weights must have been quantized before they were stored")
    return PackQuantizedLayout(
        bits=bits,
        group_size=_read_group_size(weights),
        is_symmetric=weights.flag("symmetric", default=True),
        has_act_order=_read_act_order(weights),
    )


def _read_group_size(weights: CheckpointSettings) -> int | None:
    """None for one scale a channel. Raises `CheckpointError` where strategy and group size contradict each other."""
    size = weights.integer("group_size", default=0)
    implied = "group" if size > 0 else "channel" if size == _NO_GROUPS else "tensor"
    strategy = weights.choice("strategy", covered=("group", "channel"), default=implied)
    if strategy == "group" and size < 1:
        raise weights.refusal("group_size", weights.value("group_size"), "must be positive with strategy group")
    if strategy == "channel" and size not in (0, _NO_GROUPS):
        raise weights.refusal("group_size", size, "must be -1 or absent with strategy channel")
    return size if strategy == "group" else None


def _read_act_order(weights: CheckpointSettings) -> bool:
    value = weights.value("actorder")
    value = value.lower() if isinstance(value, str) else value
    if value not in _REORDERED + _IN_ORDER:
        raise weights.refusal("actorder", value, "must be null, weight, static, group or dynamic")
    return value in _REORDERED
