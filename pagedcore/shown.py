"""Values as error messages show them: short, whatever a client sent."""

from __future__ import annotations

import reprlib

MAX_SHOWN_CHARS = 60
MAX_SHOWN_BITS = 128


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = MAX_SHOWN_CHARS

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to print integers of some thousand digits."""
        return repr(x) if x.bit_length() <= MAX_SHOWN_BITS else f"<an integer of {x.bit_length()} bits>"


_short = _Short()


def shown(value: object) -> str:
    """The repr of a value, cut to a length and a depth that fit an error message."""
    return _short.repr(value)
