"""When a process that died is started again, and when that is of no use any more."""

from __future__ import annotations

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
MAX_DOUBLINGS = 16
SHORT_LIFE_S = 60.0
"""Ready for less than this counts towards giving up, and never ready does too."""
MAX_FAILURES = 4


class Restarts:
    """Owns how often in a row one process has failed: it ended before it was ready, or soon after."""

    def __init__(self) -> None:
        self.num_failures = 0

    def note_death(self, lived_s: float) -> float:
        """Seconds to wait before the next start, twice as long each time. `lived_s` is how long it was ready, 0 for never."""
        self.num_failures = self.num_failures + 1 if lived_s < SHORT_LIFE_S else 1
        return float(min(FIRST_DELAY_S * 2 ** min(self.num_failures - 1, MAX_DOUBLINGS), MAX_DELAY_S))

    @property
    def is_hopeless(self) -> bool:
        """It has failed so often that the next start would, too."""
        return self.num_failures >= MAX_FAILURES
