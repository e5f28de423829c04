"""What an answer is made of, as it comes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """More of the answer's text, or of what the model thinks before it."""

    text: str
    is_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class CallPart:
    """More of one call: its id and name, once and before any arguments, or a piece of its arguments' JSON text."""

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


Part = TextPart | CallPart
