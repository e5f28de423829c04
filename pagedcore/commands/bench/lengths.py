"""Numbers as they are typed: a length or a range of lengths, and lists of counts."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from pagedcore.errors import ConfigError

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt or of an answer: uniform between two bounds, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, flag: str) -> Lengths:
        """`128` or `100-1024`. Raises `ConfigError` naming the flag."""
        found = _RANGE.fullmatch(text)
        if found is None:
            raise ConfigError(f"{flag} is {text!r} and must be a number of tokens, such as 128, or a range, such as 100-1024.")
        low, high = int(found[1]), int(found[2] or found[1])
        if not 1 <= low <= high:
            raise ConfigError(f"{flag} is {text!r}; a length is at least 1, and the lower end of a range comes first.")
        return cls(low, high)

    def draw(self, source: random.Random) -> int:
        return self.low if self.low == self.high else source.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


def parse_counts(text: str, flag: str) -> tuple[int, ...]:
    """`1,8,64` in rising order. Raises `ConfigError` naming the flag."""
    return tuple(int(number) for number in _numbers(text, flag, whole=True))


def parse_rates(text: str, flag: str) -> tuple[float, ...]:
    """`0.5,2` in rising order. Raises `ConfigError` naming the flag."""
    return _numbers(text, flag, whole=False)


def _numbers(text: str, flag: str, *, whole: bool) -> tuple[float, ...]:
    pattern = r"[0-9]+" if whole else r"[0-9]+(\.[0-9]+)?"
    parts = text.split(",")
    if not all(re.fullmatch(pattern, part, re.ASCII) and float(part) > 0 for part in parts):
        what = "whole numbers of at least 1" if whole else "numbers above 0"
        raise ConfigError(f"{flag} is {text!r} and must be {what} with commas between them, such as 1,8,64.")
    return tuple(sorted({float(part) for part in parts}))
