"""The tools that a request offers, and which of them the model may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedcore.errors import InvalidRequestError, UnsupportedFeatureError
from pagedcore.shown import shown
from pagedcore.tools.fields import check_fields

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One function that a model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, an object."""
    is_strict: bool
    """Its arguments must follow the schema whatever the model would write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a request offers. `choice` is "auto", "required" or "named" (the one tool is then all there is)."""

    tools: tuple[Tool, ...]
    choice: str
    are_parallel: bool
    """Several calls may come in one answer."""
    shown: tuple[Mapping[str, Any], ...]
    """All definitions as they came, for the chat template."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)


def read_tools(tools: object, choice: object, parallel: bool | None) -> Tools | None:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls` of a request; None where no tool may be called.

    Raises `InvalidRequestError` naming the field.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError(f"tool_choice={shown(choice)} needs tools; give at least one.", param="tool_choice")
        return None
    definitions = _definitions(tools)
    name = _chosen_name(choice, {tool.name for tool in definitions})
    if choice == "none":
        return None
    return Tools(
        tools=tuple(tool for tool in definitions if name is None or tool.name == name),
        choice="named" if name is not None else str(choice or "auto"),
        are_parallel=parallel is not False and name is None,
        shown=tuple(tools),  # type: ignore[arg-type]
    )


def _definitions(tools: object) -> list[Tool]:
    if not isinstance(tools, list):
        raise InvalidRequestError(f"tools must be a list of tools, got {shown(tools)}.", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools holds {len(tools)} tools; at most {MAX_TOOLS} are taken.", param="tools")
    found: dict[str, Tool] = {}
    for index, entry in enumerate(tools):
        tool = _tool(entry, f"tools[{index}]")
        if tool.name in found:
            raise InvalidRequestError(f"tools holds {tool.name!r} twice; give each its own name.", param=f"tools[{index}].function.name")
        found[tool.name] = tool
    return list(found.values())


def _tool(entry: object, where: str) -> Tool:
    if not isinstance(entry, Mapping):
        raise InvalidRequestError(f'{where} is {shown(entry)} and must be {{"type": "function", "function": ...}}.', param=where)
    if entry.get("type") != "function":
        kind = shown(entry.get("type"))
        raise UnsupportedFeatureError(f"{where}.type is {kind}; this server offers functions only.", param=f"{where}.type")
    check_fields(entry, known=("type", "function"), not_offered={}, where=f"{where}.")
    function, where = entry.get("function"), f"{where}.function"
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where} is {shown(function)} and must be an object with a name.", param=where)
    check_fields(function, known=_FUNCTION_FIELDS, not_offered={}, where=f"{where}.")
    _check_kind(function, "description", str, f"{where}.description", "a string")
    _check_kind(function, "strict", bool, f"{where}.strict", "true or false")
    return Tool(
        name=_checked_name(function.get("name"), f"{where}.name"),
        parameters=_schema(function.get("parameters"), f"{where}.parameters"),
        is_strict=bool(function.get("strict")),
    )


def _check_kind(function: Mapping[str, Any], name: str, kind: type, where: str, wanted: str) -> None:
    value = function.get(name)
    if value is not None and not isinstance(value, kind):
        raise InvalidRequestError(f"{where} is {shown(value)} and must be {wanted}.", param=where)


def _checked_name(name: object, where: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{where} is {shown(name)} and must be 1 to 64 letters, digits, underscores or dashes."
        raise InvalidRequestError(message, param=where)
    return name


def _schema(schema: object, where: str) -> Mapping[str, Any]:
    """No schema, or an empty one, is a function without arguments."""
    if schema is None or schema == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        raise InvalidRequestError(f'{where} is {shown(schema)} and must be a JSON schema of "type": "object".', param=where)
    return schema


def _chosen_name(choice: object, names: set[str]) -> str | None:
    """The name of the one tool that is asked for."""
    if choice in (None, "auto", "none", "required"):
        return None
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        wanted = 'must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
        raise InvalidRequestError(f"tool_choice is {shown(choice)} and {wanted}.", param="tool_choice")
    if name not in names:
        message = f"tool_choice names {shown(name)}, which is none of tools: {', '.join(sorted(names))}."
        raise InvalidRequestError(message, param="tool_choice")
    return name
