"""Hit rates over the last minute and since start."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

WINDOW_S = 60


def ratio(part: float, whole: float) -> float:
    """`part / whole`; NaN where there was nothing to take a part of."""
    return part / whole if whole else math.nan


@dataclass(frozen=True, slots=True)
class CacheTotals:
    """The numerators and denominators of all hit rates, since start."""

    page_hits: int = 0
    page_lookups: int = 0
    hit_tokens: int = 0
    query_tokens: int = 0
    reused_blocks: int = 0
    acquired_blocks: int = 0
    ideal_hit_tokens: int = 0

    def rate_since(self, level: str, start: CacheTotals) -> float:
        """Hit rate of a level ("page", "prefix", "pool" or "ideal") for what came after `start`."""
        part, whole = _TERMS[level]
        return ratio(getattr(self, part) - getattr(start, part), getattr(self, whole) - getattr(start, whole))


_TERMS = {
    "page": ("page_hits", "page_lookups"),
    "prefix": ("hit_tokens", "query_tokens"),
    "pool": ("reused_blocks", "acquired_blocks"),
    "ideal": ("ideal_hit_tokens", "query_tokens"),
}


class RateWindow:
    """Owns the totals at the end of each second that changed them, for the last minute.

    The window is the current second and the 59 before it.
    """

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, CacheTotals]] = deque([(-WINDOW_S, CacheTotals())])

    def sample(self, last_change_s: float, totals: CacheTotals) -> None:
        """Note the totals after a change; call it before a change in a later second."""
        second = math.floor(last_change_s)
        if self._seconds[-1][0] >= second:
            self._seconds[-1] = (self._seconds[-1][0], totals)
        elif self._seconds[-1][1] != totals:
            self._seconds.append((second, totals))

    def start(self, now_s: float) -> CacheTotals:
        """The totals just before the window; forgets what lies before them."""
        while len(self._seconds) > 1 and self._seconds[1][0] <= math.floor(now_s) - WINDOW_S:
            self._seconds.popleft()
        return self._seconds[0][1]
