"""Values as error messages and logs show them: short, whatever a client sent. What was cut says so."""

from __future__ import annotations

import reprlib

MAX_SHOWN_CHARS = 60
MAX_SHOWN_BITS = 128
CUT = "..."
"""Stands where something was left out."""


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = MAX_SHOWN_CHARS
        self.fillvalue = CUT

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to print integers of some thousand digits."""
        return repr(x) if x.bit_length() <= MAX_SHOWN_BITS else f"<an integer of {x.bit_length()} bits>"


_short = _Short()


def shown(value: object) -> str:
    """The repr of a value, cut to a length and a depth that fit an error message."""
    return _short.repr(value)


def shortened(text: str, max_chars: int) -> str:
    """The text, cut in its middle to a length as `shown` does it, without quotes."""
    if len(text) <= max_chars:
        return text
    num_head = (max_chars - len(CUT)) // 2
    return text[:num_head] + CUT + text[len(text) - (max_chars - len(CUT) - num_head) :]
