"""Parts of an answer as OpenAI's objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedcore.tools.parts import CallPart, Part, TextPart


def delta_of(part: Part) -> dict[str, Any]:
    """The delta of one chunk. A call's first one has its id, its name and empty arguments."""
    if isinstance(part, TextPart):
        return {"reasoning_content" if part.is_reasoning else "content": part.text}
    function: dict[str, Any] = {"arguments": part.arguments}
    if part.name is None:
        return {"tool_calls": [{"index": part.index, "function": function}]}
    begun = {"index": part.index, "id": part.call_id, "type": "function", "function": {"name": part.name, **function}}
    return {"tool_calls": [begun]}


def message_of(parts: Sequence[Part], role: str) -> dict[str, Any]:
    """The whole message. Its content is null where there are calls and no text."""
    texts = [part for part in parts if isinstance(part, TextPart)]
    calls = _calls([part for part in parts if isinstance(part, CallPart)])
    content = "".join(part.text for part in texts if not part.is_reasoning)
    message: dict[str, Any] = {"role": role, "content": content if content or not calls else None, "refusal": None}
    if any(part.is_reasoning for part in texts):
        message["reasoning_content"] = "".join(part.text for part in texts if part.is_reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _calls(parts: Sequence[CallPart]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.name is not None:
            calls.append({"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": ""}})
        calls[part.index]["function"]["arguments"] += part.arguments
    return calls
