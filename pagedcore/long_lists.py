"""Long lists in pieces: one call over a million items would hold the interpreter's lock for tens of milliseconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

PIECE_LENGTH = 1 << 14
"""Items that are looked at in one call."""


def pieces(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Copies of the parts of a list, in order."""
    return (values[start : start + PIECE_LENGTH] for start in range(0, len(values), PIECE_LENGTH))


def discard(values: list[Any]) -> None:
    """Empty a list that nobody else uses, so that its items are not all freed in one call."""
    while values:
        del values[-PIECE_LENGTH:]


def holds_only(values: Sequence[Any], kind: type) -> bool:
    """Whether every item is of just this type; a boolean is no integer here."""
    return all(set(map(type, piece)) == {kind} for piece in pieces(values))


def is_within(values: Sequence[int], low: int, end: int) -> bool:
    """Whether every number is at least `low` and below `end`."""
    return all(min(piece) >= low and max(piece) < end for piece in pieces(values))
