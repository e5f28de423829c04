"""What the advisor says: sentences with their numbers, and the numbers behind them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from pagedcore.advice.costly_prefixes import CostlyPrefix
from pagedcore.advice.reuse_sketch import CurvePoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Advice for one engine or trace. For operators: it names tenants."""

    sentences: tuple[str, ...]
    hit_rate: float | None
    """Prompt tokens served from the cache / prompt tokens; None before the first lookup."""
    ideal_hit_rate: float | None
    """That of an unbounded pool."""
    curve: tuple[CurvePoint, ...]
    """The predicted hit rate of pools of 0.25x to 8x the memory, by block size, without those that could not hold what ran together."""
    costliest_prefixes: tuple[CostlyPrefix, ...]
    """At most ten, the one that cost most tokens first."""
    num_lookups: int
    window_s: float
    """Seconds from the first lookup to now, or to the end of the trace."""

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        return {
            "sentences": list(self.sentences),
            "hit_rate": self.hit_rate,
            "ideal_hit_rate": self.ideal_hit_rate,
            "curve": [dataclasses.asdict(point) for point in self.curve],
            "costliest_prefixes": [dataclasses.asdict(prefix) for prefix in self.costliest_prefixes],
            "num_lookups": self.num_lookups,
            "window_s": self.window_s,
        }
