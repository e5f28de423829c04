"""A number that was measured in several rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Round = TypeVar("Round")


@dataclass(frozen=True, slots=True)
class Spread:
    """`value` stands for the rounds, each of which is kept."""

    value: float
    rounds: tuple[float, ...]

    @classmethod
    def median_of(cls, rounds: Sequence[float]) -> Spread:
        """The median, which is the mean of the middle two where their number is even."""
        return cls(statistics.median(rounds), tuple(rounds))

    @classmethod
    def over(cls, rounds: Sequence[Round], number: Callable[[Round], float]) -> Spread:
        """The median of one number of each round."""
        return cls.median_of([number(one) for one in rounds])

    @property
    def low(self) -> float:
        return min(self.rounds)

    @property
    def high(self) -> float:
        return max(self.rounds)

    def times(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(self.value * factor, tuple(value * factor for value in self.rounds))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; NaN where there are none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def weighted_percentile(values: Sequence[tuple[float, float]], share: float) -> float:
    """The same over (value, weight): each value counts as often as its weight says."""
    wanted, seen = share * sum(weight for _, weight in values), 0.0
    for value, weight in sorted(values):
        seen += weight
        if seen >= wanted:
            return value
    return math.nan
