"""JSON read character by character: what is wrong is known at the first wrong character, however the text is cut."""

from __future__ import annotations

import re
from enum import Enum, auto

WHITESPACE = " \t\n\r"

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_NUMBER_CHARS = frozenset("0123456789+-.eE")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSING = {"{": "}", "[": "]"}
_HEX = frozenset("0123456789abcdefABCDEF")


class Step(Enum):
    """What a character was."""

    MORE = auto()
    """A part of the value, which goes on."""
    LAST = auto()
    """The last character of the value."""
    PAST = auto()
    """No part of the value, which had ended before it (only a number ends so)."""
    WRONG = auto()
    """Not JSON."""


class _Place(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    AFTER_VALUE = auto()
    STRING = auto()
    ESCAPE = auto()
    UNICODE = auto()
    NUMBER = auto()
    LITERAL = auto()


class JsonScanner:
    """Owns the place in one JSON value. Keeps no text."""

    def __init__(self) -> None:
        self._place = _Place.VALUE
        self._open: list[str] = []
        """Brackets that are not closed."""
        self._is_key = False
        self._word = ""
        """The number so far, or what is left of a literal or of four hexadecimal digits."""

    def push(self, char: str) -> Step:
        """Take one character. After LAST, PAST and WRONG nothing may follow."""
        place = self._place
        if place is _Place.STRING:
            return self._in_string(char)
        if place in (_Place.ESCAPE, _Place.UNICODE):
            return self._in_escape(char)
        if place is _Place.NUMBER:
            return self._in_number(char)
        if place is _Place.LITERAL:
            return self._in_literal(char)
        if char in WHITESPACE:
            return Step.MORE
        return self._between(char)

    def _between(self, char: str) -> Step:
        place = self._place
        if place is _Place.AFTER_VALUE:
            return self._after_value(char)
        if place is _Place.COLON:
            return self._go(_Place.VALUE) if char == ":" else Step.WRONG
        if (place is _Place.FIRST_KEY and char == "}") or (place is _Place.FIRST_ITEM and char == "]"):
            return self._close()
        if place in (_Place.FIRST_KEY, _Place.KEY):
            self._is_key = True
            return self._go(_Place.STRING) if char == '"' else Step.WRONG
        return self._begin_value(char)

    def _begin_value(self, char: str) -> Step:
        self._is_key = False
        if char in _CLOSING:
            self._open.append(char)
            return self._go(_Place.FIRST_KEY if char == "{" else _Place.FIRST_ITEM)
        if char == '"':
            return self._go(_Place.STRING)
        if char in _LITERALS:
            self._word = _LITERALS[char][1:]
            return self._go(_Place.LITERAL)
        self._word = char
        return self._go(_Place.NUMBER) if char in "-0123456789" else Step.WRONG

    def _after_value(self, char: str) -> Step:
        if char == ",":
            return self._go(_Place.KEY if self._open[-1] == "{" else _Place.VALUE)
        return self._close() if char == _CLOSING[self._open[-1]] else Step.WRONG

    def _in_string(self, char: str) -> Step:
        if char == "\\":
            return self._go(_Place.ESCAPE)
        if char != '"':
            return Step.MORE if char >= " " else Step.WRONG
        return self._go(_Place.COLON) if self._is_key else self._end_value()

    def _in_escape(self, char: str) -> Step:
        if self._place is _Place.UNICODE:
            self._word = self._word[1:]
            return Step.WRONG if char not in _HEX else self._go(_Place.UNICODE if self._word else _Place.STRING)
        if char == "u":
            self._word = "0000"
            return self._go(_Place.UNICODE)
        return self._go(_Place.STRING) if char in '"\\/bfnrt' else Step.WRONG

    def _in_number(self, char: str) -> Step:
        if char in _NUMBER_CHARS:
            self._word += char
            return Step.MORE
        if not _NUMBER.fullmatch(self._word):
            return Step.WRONG
        if self._end_value() is Step.LAST:
            return Step.PAST
        return Step.MORE if char in WHITESPACE else self._after_value(char)

    def _in_literal(self, char: str) -> Step:
        if char != self._word[0]:
            return Step.WRONG
        self._word = self._word[1:]
        return Step.MORE if self._word else self._end_value()

    def _close(self) -> Step:
        self._open.pop()
        return self._end_value()

    def _end_value(self) -> Step:
        self._place = _Place.AFTER_VALUE
        return Step.MORE if self._open else Step.LAST

    def _go(self, place: _Place) -> Step:
        self._place = place
        return Step.MORE
