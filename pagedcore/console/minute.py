"""The last minute, second by second."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

WINDOW_S = 60
"""The current second and the 59 before it."""

T = TypeVar("T")


class Minute(Generic[T]):
    """Owns what a caller counted in each second of the last minute; seconds in which nothing happened are left out."""

    def __init__(self, make: Callable[[], T]) -> None:
        """`make` gives the empty count of a second."""
        self._make = make
        self._seconds: deque[tuple[int, T]] = deque()

    def at(self, now_s: float) -> T:
        """What is counted in the second of `now_s`, the latest one. Forgets what is older than a minute."""
        second = math.floor(now_s)
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append((second, self._make()))
            self._forget(second)
        return self._seconds[-1][1]

    def until(self, now_s: float) -> list[T]:
        """The seconds of the minute that ends at `now_s`, in order. Forgets what is older."""
        self._forget(math.floor(now_s))
        return [counted for _, counted in self._seconds]

    def _forget(self, now: int) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            self._seconds.popleft()


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of the values does not exceed; None without values."""
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else None
