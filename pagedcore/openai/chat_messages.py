"""Messages of a chat as a template takes them: a role and plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedcore.client import TextFront
from pagedcore.errors import InvalidRequestError, UnsupportedFeatureError
from pagedcore.openai.bodies import Neutral, TemplateFields
from pagedcore.openai.parsing import check_fields
from pagedcore.shown import shown

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role of the client -> role of the template: "developer" is the newer name of "system"."""

_KNOWN = ("role", "content", "name")
_NOT_OFFERED: Neutral = {
    **dict.fromkeys(("audio", "function_call", "reasoning", "reasoning_content", "refusal", "tool_call_id"), ()),
    **dict.fromkeys(("annotations", "tool_calls"), ([],)),
}
_FIELDS = {"add_generation_prompt", "chat_template", "continue_final_message", "documents", "messages", "tools"}
_RESERVED = _FIELDS | {"conversation", "self", "tokenize"}
"""Not to be given in chat_template_kwargs: fields of the body, and what is no argument of a template."""


def render(body: TemplateFields, messages: Sequence[dict[str, Any]], text: TextFront) -> str:
    """The prompt of a chat. Raises `InvalidRequestError` for messages and template arguments that cannot be used."""
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one message.", param="messages")
    reserved = sorted(_RESERVED.intersection(body.chat_template_kwargs))
    if reserved:
        raise InvalidRequestError(f"chat_template_kwargs must not hold {', '.join(reserved)}.", param="chat_template_kwargs")
    kwargs: dict[str, Any] = {**body.chat_template_kwargs, "add_generation_prompt": _adds_generation_prompt(body)}
    if body.continue_final_message:
        kwargs["continue_final_message"] = True
    return text.render_chat([_message(index, message) for index, message in enumerate(messages)], **kwargs)


def _adds_generation_prompt(body: TemplateFields) -> bool:
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError("continue_final_message excludes add_generation_prompt; give one.", param="continue_final_message")
    return not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]."
    check_fields(message, known=_KNOWN, not_offered=_NOT_OFFERED, where=where)
    role = message.get("role")
    if role in ("tool", "function"):
        raise UnsupportedFeatureError(f"{where}role={role!r} is not offered by this server: it offers no tools.", param=f"{where}role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(f"{where}role is {shown(role)} and must be one of {', '.join(ROLES)}.", param=f"{where}role")
    rendered = {"role": ROLES[role], "content": _content(message.get("content"), role, f"{where}content")}
    if (name := message.get("name")) is not None:
        rendered["name"] = _string(name, f"{where}name")
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


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where} is {shown(value)} and must be a string.", param=where)
    return value
