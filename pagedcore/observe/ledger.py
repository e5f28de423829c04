"""One engine's exact numbers in plain Python, and what of them has not been exported yet."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from pagedcore.core.events import Finished
from pagedcore.observe.catalogue import FAMILIES, Family

Key = tuple[str, ...]
"""Family name, then its label values in the order of `Family.labels`."""

Handlers = dict[type, Callable[[Any], object]]
"""By type of event: what a book does with it."""

Exemplar = tuple[float, str]
"""One observed value, and the id of the trace that it belongs to."""


class Sink(Protocol):
    """Where a ledger's numbers go: the children of one engine in one registry."""

    def add(self, key: Key, amount: float) -> None: ...

    def set(self, key: Key, value: float) -> None: ...

    def observe(self, key: Key, counts: dict[int, int], total: float, exemplars: dict[int, Exemplar]) -> None:
        """Add observations: bucket index -> how many, the sum of their values, and bucket index -> an example of them."""
        ...


class PendingHistogram:
    """Observations since the last export: bucket index -> how many, and the sum of the values."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._buckets = buckets
        self.counts: dict[int, int] = {}
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, trace_id: str | None = None) -> None:
        """Observe a value, which is its bucket's exemplar if it belongs to a trace."""
        index, counts = bisect_left(self._buckets, value), self.counts
        counts[index] = counts.get(index, 0) + 1
        self.total += value
        if trace_id is not None:
            self.exemplars[index] = (value, trace_id)

    def observe_many(self, values: Sequence[float]) -> None:
        """Observe each value. Sorting once and cutting at the bounds is cheaper than a search for each value."""
        ordered, begin = sorted(values), 0
        for index, bound in enumerate(self._buckets):
            end = bisect_right(ordered, bound, begin)
            if end > begin:
                self._count(index, end - begin)
                begin = end
        if begin < len(ordered):
            self._count(len(self._buckets), len(ordered) - begin)
        self.total += sum(ordered)

    def _count(self, index: int, num: int) -> None:
        self.counts[index] = self.counts.get(index, 0) + num

    def clear(self) -> None:
        self.counts = {}
        self.total = 0.0
        self.exemplars = {}


class Ledger:
    """Owns the totals since start, the gauges, and the histograms' unexported part. Not thread-safe: the recorder locks."""

    def __init__(self, families: Mapping[str, Family] = FAMILIES) -> None:
        self.families = families
        self._totals: dict[Key, float] = dict.fromkeys(_initial_keys(families, "counter"), 0)
        self._exported: dict[Key, float] = {}
        self._gauges: dict[Key, float] = dict.fromkeys(_initial_keys(families, "gauge"), 0)
        self._exported_gauges: dict[Key, float] = {}
        self._histograms = {f.name: PendingHistogram(f.buckets) for f in families.values() if f.kind == "histogram"}

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Count `amount` up; label values that were not there before begin at 0."""
        key = (name, *labels)
        self._totals[key] = self._totals.get(key, 0) + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        self._gauges[(name, *labels)] = value

    def observe(self, name: str, value: float, trace_id: str | None = None) -> None:
        self._histograms[name].observe(value, trace_id)

    def observe_many(self, name: str, values: Sequence[float]) -> None:
        self._histograms[name].observe_many(values)

    def note_end(self, event: Finished) -> None:
        """A choice ended whose arrival was recorded. Here its numbers come one by one, so nothing is left to do."""

    def gauge(self, name: str, *labels: str) -> float | None:
        """None for one that was never set and is not there from the start."""
        return self._gauges.get((name, *labels))

    def count(self, name: str, *labels: str) -> int:
        return int(self._totals.get((name, *labels), 0))

    def seconds(self, name: str, *labels: str) -> float:
        return self._totals.get((name, *labels), 0.0)

    def sum_over_labels(self, name: str, label: str) -> dict[str, int]:
        """Value of `label` -> count, summed over the other labels."""
        position = 1 + FAMILIES[name].labels.index(label)
        sums: Counter[str] = Counter()
        for key, amount in self._totals.items():
            if key[0] == name:
                sums[key[position]] += int(amount)
        return dict(sums)

    def export(self, sink: Sink) -> None:
        """Hand the sink what changed since the last export. The first export creates every child."""
        self.export_counters(sink, self._totals)
        for key, value in self._gauges.items():
            if _differs(value, self._exported_gauges.get(key)):
                sink.set(key, value)
                self._exported_gauges[key] = value
        for name, histogram in self._histograms.items():
            pending = (histogram.counts, histogram.total, histogram.exemplars)
            histogram.clear()  # before: what fails half-way is not observed twice
            sink.observe((name,), *pending)

    def export_counters(self, sink: Sink, keys: Iterable[Key]) -> None:
        """Of these counters alone."""
        for key in keys:
            total = self._totals[key]
            if total != self._exported.get(key):
                sink.add(key, total - self._exported.get(key, 0))
                self._exported[key] = total


def _initial_keys(families: Mapping[str, Family], kind: str) -> list[Key]:
    return [(family.name, *labels) for family in families.values() if family.kind == kind for labels in family.children]


def _differs(value: float, exported: float | None) -> bool:
    """Whether a gauge must be written again; NaN equals NaN here."""
    return exported is None or not (value == exported or (math.isnan(value) and math.isnan(exported)))
