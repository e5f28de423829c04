"""LangChain messages as the dictionaries of OpenAI's chats, from which a prompt is rendered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage

from pagedcore.errors import UnsupportedFeatureError

_ROLES: dict[type[BaseMessage], str] = {HumanMessage: "user", AIMessage: "assistant", SystemMessage: "system", ToolMessage: "tool"}
_CALL_BLOCKS = ("tool_call", "invalid_tool_call", "tool_use")
"""Blocks that say again what `tool_calls` and `invalid_tool_calls` hold."""


def chat_message(message: BaseMessage) -> dict[str, Any]:
    """One message. Raises `UnsupportedFeatureError` for what is neither text nor a call of a tool.

    A tool's `status` and `artifact` are the program's: what the model shall know of them is in the content.
    """
    fields: dict[str, Any] = {"role": _role(message), "content": _text(message)}
    if message.name:
        fields["name"] = message.name
    if isinstance(message, ToolMessage):
        fields["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage):
        fields |= {"tool_calls": _calls(message), "reasoning_content": _reasoning(message)}
    return {name: value for name, value in fields.items() if value not in (None, [])}


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise UnsupportedFeatureError(
        f"Messages of type {message.type!r} are not offered; use system, human, ai, tool and chat messages.", param="messages"
    )


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    passes_over = _belongs_elsewhere(message)
    return "".join(_block_text(block) for block in message.content if isinstance(block, str) or not passes_over(block))


def _block_text(block: str | dict[Any, Any]) -> str:
    if isinstance(block, str):
        return block
    if block.get("type") == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    raise UnsupportedFeatureError(f"Content blocks of type {block.get('type')!r} are not offered; send text.", param="messages")


def _belongs_elsewhere(message: BaseMessage) -> Callable[[dict[Any, Any]], bool]:
    """Whether a block of an answer is no text of it, and reaches the template in a field of its own."""
    if not isinstance(message, AIMessage):
        return lambda _: False
    ids = {call["id"] for call in [*message.tool_calls, *message.invalid_tool_calls]}
    return lambda block: _is_reasoning(block) or (block.get("type") in _CALL_BLOCKS and block.get("id") in ids)


def _is_reasoning(block: dict[Any, Any]) -> bool:
    return block.get("type") == "reasoning" and isinstance(block.get("reasoning"), str)


def _reasoning(message: AIMessage) -> str | None:
    blocks = message.content if isinstance(message.content, list) else []
    said = "".join(block["reasoning"] for block in blocks if isinstance(block, dict) and _is_reasoning(block))
    return said or message.additional_kwargs.get("reasoning_content")


def _calls(message: AIMessage) -> list[dict[str, Any]]:
    right = [_call(call["id"], call["name"], json.dumps(call["args"], ensure_ascii=False)) for call in message.tool_calls]
    return right + [_call(call["id"], call["name"], call["args"] or "") for call in message.invalid_tool_calls]


def _call(call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
