"""Messages of a chat as a template takes them: a role and plain text, and in an assistant's and a tool's what belongs to calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagedcore.client import TextFront
from pagedcore.errors import InvalidRequestError, UnsupportedFeatureError
from pagedcore.long_lists import discard
from pagedcore.shown import shown
from pagedcore.tools.fields import Neutral, check_fields

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Role of the client -> role of the template: "developer" is the newer name of "system"."""

_KNOWN = ("role", "content", "name")
_KNOWN_BESIDE = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("tool_call_id",)}
"""Role -> fields that only its messages have."""
_NOT_OFFERED: Neutral = {
    **dict.fromkeys(("audio", "function_call", "reasoning", "reasoning_content", "refusal", "tool_call_id"), ()),
    **dict.fromkeys(("annotations", "tool_calls"), ([],)),
}
_FIELDS = {"add_generation_prompt", "chat_template", "continue_final_message", "documents", "messages", "tools"}
_RESERVED = _FIELDS | {"conversation", "self", "tokenize"}
"""Not to be given in chat_template_kwargs: fields of the body, and what is no argument of a template."""


class TemplateOptions(Protocol):
    """What a request says of its prompt."""

    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateArguments:
    """Those options for callers who have no body of a request."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


def render(
    options: TemplateOptions, messages: Sequence[dict[str, Any]], text: TextFront, tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """The prompt of a chat. Raises `InvalidRequestError` for messages and template arguments that cannot be used."""
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one message.", param="messages")
    reserved = sorted(_RESERVED.intersection(options.chat_template_kwargs))
    if reserved:
        raise InvalidRequestError(f"chat_template_kwargs must not hold {', '.join(reserved)}.", param="chat_template_kwargs")
    kwargs: dict[str, Any] = {**options.chat_template_kwargs, "add_generation_prompt": _adds_generation_prompt(options)}
    if options.continue_final_message:
        kwargs["continue_final_message"] = True
    if tools is not None:
        kwargs["tools"] = [dict(tool) for tool in tools]
    read = [_message(index, message) for index, message in enumerate(messages)]
    rendered = text.render_chat(read, **kwargs)
    discard(read)
    return rendered


def _adds_generation_prompt(options: TemplateOptions) -> bool:
    if options.continue_final_message and options.add_generation_prompt:
        raise InvalidRequestError("continue_final_message excludes add_generation_prompt; give one.", param="continue_final_message")
    return not options.continue_final_message if options.add_generation_prompt is None else options.add_generation_prompt


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]."
    role = message.get("role")
    known = (*_KNOWN, *_KNOWN_BESIDE.get(str(role), ()))
    check_fields(message, known=known, not_offered={k: v for k, v in _NOT_OFFERED.items() if k not in known}, where=where)
    if role == "function":
        raise UnsupportedFeatureError(f"{where}role='function' is not offered by this server; use the role 'tool'.", param=f"{where}role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(f"{where}role is {shown(role)} and must be one of {', '.join(ROLES)}.", param=f"{where}role")
    rendered: dict[str, Any] = {"role": ROLES[role], "content": _content(message.get("content"), role, f"{where}content")}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if message.get(name) is not None:
            rendered[name] = _string(message[name], f"{where}{name}")
    if message.get("tool_calls"):
        rendered["tool_calls"] = _calls(message["tool_calls"], f"{where}tool_calls")
    return rendered


def _content(content: object, role: str, where: str) -> str:
    if content is None and role == "assistant":
        return ""
    if isinstance(content, list):
        return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))
    return _string(content, where)


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequestError(f'{where} is {shown(part)} and must be a part such as {{"type": "text", "text": ...}}.', param=where)
    if part.get("type") != "text":
        kind = shown(part.get("type"))
        raise UnsupportedFeatureError(f"{where} has type {kind}; this server offers text parts only.", param=f"{where}.type")
    check_fields(part, known=("type", "text"), not_offered={}, where=f"{where}.")
    return _string(part.get("text"), f"{where}.text")


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Calls of an earlier answer. Their arguments are JSON text; the template gets the object where it is one."""
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{where} is {shown(calls)} and must be a list of calls.", param=where)
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        wanted = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
        raise InvalidRequestError(f"{where} is {shown(call)} and must be {wanted}.", param=where)
    check_fields(call, known=("id", "type", "function", "index"), not_offered={}, where=f"{where}.")
    check_fields(function, known=("name", "arguments"), not_offered={}, where=f"{where}.function.")
    if call.get("type", "function") != "function":
        raise UnsupportedFeatureError(f"{where}.type is {shown(call['type'])}; this server offers functions only.", param=f"{where}.type")
    named = {name: _string(function.get(name), f"{where}.function.{name}") for name in ("name", "arguments")}
    return {"id": _string(call.get("id"), f"{where}.id"), "type": "function", "function": named}


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where} is {shown(value)} and must be a string.", param=where)
    return value
