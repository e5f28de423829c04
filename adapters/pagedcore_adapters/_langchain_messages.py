"""LangChain messages as the dictionaries that a chat template reads."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage

from pagedcore.errors import UnsupportedFeatureError

_ROLES: dict[type[BaseMessage], str] = {HumanMessage: "user", AIMessage: "assistant", SystemMessage: "system"}


def chat_message(message: BaseMessage) -> dict[str, Any]:
    """One message with role, content and, where it has one, name. Raises `UnsupportedFeatureError` for tools and for what is not text."""
    named = {"name": message.name} if message.name else {}
    return {"role": _role(message), "content": _text(message), **named}


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if isinstance(message, AIMessage) and (message.tool_calls or message.invalid_tool_calls):
        raise UnsupportedFeatureError("A message holds tool calls, and tool calling is not offered by this version.", param="messages")
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise UnsupportedFeatureError(
        f"Messages of type {message.type!r} are not offered; use system, human, ai and chat messages.", param="messages"
    )


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(_block_text(block) for block in message.content)


def _block_text(block: str | dict[Any, Any]) -> str:
    if isinstance(block, str):
        return block
    if block.get("type") == "text" and isinstance(block.get("text"), str):
        return str(block["text"])
    raise UnsupportedFeatureError(f"Content blocks of type {block.get('type')!r} are not offered; send text.", param="messages")
