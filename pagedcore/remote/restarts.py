"""When a process that died is started again, and when no more."""

from __future__ import annotations

from collections.abc import Callable

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
QUICK_DEATH_S = 60.0
"""A life shorter than this counts towards giving up."""
MAX_QUICK_DEATHS = 4


class Restarts:
    """Owns the count of quick deaths in a row."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._born_s = clock()
        self.num_quick_deaths = 0

    def note_birth(self) -> None:
        self._born_s = self._clock()

    def note_death(self) -> float | None:
        """Seconds to wait before the next start; None to give up."""
        is_quick = self._clock() - self._born_s < QUICK_DEATH_S
        self.num_quick_deaths = self.num_quick_deaths + 1 if is_quick else 1
        if self.num_quick_deaths >= MAX_QUICK_DEATHS:
            return None
        return float(min(FIRST_DELAY_S * 2 ** (self.num_quick_deaths - 1), MAX_DELAY_S))
