"""One call as a model writes it: {"name": ..., "arguments": {...}}, read while it is being written."""

from __future__ import annotations

import json
from collections.abc import Collection

from pagedcore.tools.json_scan import WHITESPACE, JsonScanner, Step

ARGUMENT_KEYS = ("arguments", "parameters")
_KEYS = ("name", "id", "type", *ARGUMENT_KEYS)


class CallReader:
    """Owns what is known of one call so far. Beside name and arguments it may have an id and a type, which are passed over."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.name: str | None = None
        self._expects = "{"
        self._key: str | None = None
        self._text = ""
        """The key or the value that is being read."""
        self._scanner: JsonScanner | None = None
        self._arguments: str | None = None

    @property
    def arguments(self) -> str:
        """Their JSON text as far as it is certain: what is there now stays."""
        if self._arguments is not None:
            return self._arguments
        is_being_read = self._key in ARGUMENT_KEYS and self._scanner is not None and self._text.startswith("{")
        return self._text if is_being_read else ""

    def push(self, char: str) -> Step:
        """Take one character; WRONG as soon as this can be no call of a known tool. Never PAST."""
        if self._scanner is not None:
            step = self._scanner.push(char)
            if step is Step.WRONG:
                return step
            if step is not Step.PAST:
                self._text += char
            if step is Step.MORE:
                return step
            self._scanner = None
            is_right = self._end_key() if self._key is None else self._end_value()
            if not is_right or step is Step.LAST:
                return Step.MORE if is_right else Step.WRONG
        return Step.MORE if char in WHITESPACE else self._between(char)

    def _between(self, char: str) -> Step:
        if self._expects == "value":
            return self._begin(char) if self._may_begin(char) else Step.WRONG
        if char not in self._expects:
            return Step.WRONG
        if char == '"':
            self._key = None
            return self._begin(char)
        if char == "}":
            return self._end()
        self._expects = {"{": '"}', ",": '"', ":": "value"}[char]
        return Step.MORE

    def _may_begin(self, char: str) -> bool:
        """Arguments are an object, or JSON text of one, or null."""
        return self._key not in ARGUMENT_KEYS or char in '{"n'

    def _begin(self, char: str) -> Step:
        self._text = ""
        self._scanner = JsonScanner()
        step = self._scanner.push(char)
        self._text = char
        return step

    def _end_key(self) -> bool:
        self._key = json.loads(self._text)
        self._expects = ":"
        is_twice = (self._key == "name" and self.name is not None) or (self._key in ARGUMENT_KEYS and self._arguments is not None)
        return self._key in _KEYS and not is_twice

    def _end_value(self) -> bool:
        """Whether the member is a right one."""
        self._expects = ",}"
        if self._key == "name":
            name = json.loads(self._text)
            if not isinstance(name, str) or name not in self._names:
                return False
            self.name = name
            return True
        if self._key in ARGUMENT_KEYS:
            self._arguments = _object_text(self._text)
            return self._arguments is not None
        return True

    def _end(self) -> Step:
        if self.name is None:
            return Step.WRONG
        if self._arguments is None:
            self._arguments = "{}"
        return Step.LAST


def _object_text(text: str) -> str | None:
    """JSON text of an object out of a value that is one, or that is a string which holds one; null is the empty object."""
    if text.startswith("{"):
        return text
    value = json.loads(text)
    if value is None:
        return "{}"
    try:
        return str(value) if isinstance(json.loads(value), dict) else None
    except ValueError:
        return None
