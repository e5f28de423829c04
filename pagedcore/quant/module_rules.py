"""Which modules the rules of a quantization config speak of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedcore.quant.checkpoint_settings import CheckpointSettings


def holds_components(module: str, rule: str) -> bool:
    """Whether `rule` is the module's name, or a run of its whole dotted components."""
    return f".{rule}." in f".{module}."


def ends_in_components(module: str, name: str) -> bool:
    """Whether `name` is the module's name, or its last whole dotted components."""
    return f".{module}".endswith(f".{name}")


@dataclass(frozen=True, slots=True)
class DynamicRule:
    """One entry of GPTQModel's `dynamic`: modules whose full name the pattern matches from its start."""

    pattern: re.Pattern[str]
    overrides: Mapping[str, Any] | None
    """Settings that these modules have instead of the file's; None: they are left unquantized."""

    def matches(self, module: str) -> bool:
        return self.pattern.match(module) is not None


def read_dynamic_rules(dynamic: object, where: str) -> tuple[DynamicRule, ...]:
    """In the file's order, of which the first that matches a module decides; none if `dynamic` is null.

    A key is a regular expression, or `+:` and one, or `-:` and one for modules left unquantized.
    Raises `CheckpointError`, naming key, value and file, for a bad expression or overrides that are no object.
    """
    CheckpointSettings({"dynamic": dynamic}, where).section("dynamic")
    return tuple(_read_rule(key, overrides, where) for key, overrides in (dynamic.items() if isinstance(dynamic, dict) else ()))


def _read_rule(key: str, overrides: Any, where: str) -> DynamicRule:
    sign, expression = (key[0], key[2:]) if key.startswith(("+:", "-:")) else ("+", key)
    pattern = CheckpointSettings({}, where).pattern("dynamic", key, expression)
    if sign == "-":
        return DynamicRule(pattern, None)
    if overrides is not None and not isinstance(overrides, dict):
        raise CheckpointSettings({}, where, "dynamic.").refusal(key, overrides, "must be an object")
    return DynamicRule(pattern, overrides or {})
