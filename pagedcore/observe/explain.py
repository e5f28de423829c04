"""What is known of each request's lookup: its cache report, and which tokens to compute could have been avoided."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass, field

from pagedcore.core.lookup import LookupReport
from pagedcore.observe.catalogue import PENALTY_REASONS
from pagedcore.observe.misses import Misses
from pagedcore.outputs import CacheReport

NUM_FINISHED_KEPT = 1024
"""Ended requests whose report can still be asked for."""


@dataclass(slots=True)
class Lookup:
    """One request's lookup. `report` is provisional until the request has ended."""

    report: CacheReport
    misses: Misses
    position: int
    """Prompt tokens that are served or were computed for the first time."""
    num_to_recompute: int = 0
    """Tokens of the next chunks that repeat work done before a preemption."""
    avoidable: list[tuple[int, int, str]] = field(default_factory=list)
    """Token ranges [start, end) whose blocks had been computed before, with the miss reason."""

    def advance(self, num_tokens: int) -> list[tuple[str, int]]:
        """Note that prompt tokens are computed; returns (reason, avoidable tokens among them)."""
        num_repeated = min(num_tokens, self.num_to_recompute)
        self.num_to_recompute -= num_repeated
        start, self.position = self.position, self.position + num_tokens - num_repeated
        found = [(reason, min(end, self.position) - max(begin, start)) for begin, end, reason in self.avoidable]
        self.avoidable = [part for part in self.avoidable if part[1] > self.position]
        return [(reason, count) for reason, count in found if count > 0]


class LookupStore:
    """Owns the lookups of the running requests and of the last `NUM_FINISHED_KEPT` ended ones."""

    def __init__(self) -> None:
        self._running: dict[str, Lookup] = {}
        self._finished: OrderedDict[str, Lookup] = OrderedDict()

    def open(self, request_id: str, lookup: LookupReport, misses: Misses) -> CacheReport:
        """Begin with a request; returns its provisional report."""
        report = dataclasses.replace(
            lookup.provisional_report(),
            miss_blocks=misses.by_reason(),
            diverged_at_token=misses.diverged_at_token,
            evicted_age_s=misses.evicted_age_s,
        )
        self._running[request_id] = Lookup(report, misses, lookup.num_hit_tokens, avoidable=_avoidable_ranges(lookup, misses))
        return report

    def running(self, request_id: str) -> Lookup | None:
        return self._running.get(request_id)

    def close(self, request_id: str, num_computed_tokens: int, num_abandoned_tokens: int) -> bool:
        """The request ended: its report is final. False when it had no lookup."""
        lookup = self._running.pop(request_id, None)
        if lookup is None:
            return False
        lookup.report = dataclasses.replace(lookup.report, computed_tokens=num_computed_tokens, abandoned_tokens=num_abandoned_tokens)
        self._finished[request_id] = lookup
        self._finished.move_to_end(request_id)
        if len(self._finished) > NUM_FINISHED_KEPT:
            self._finished.popitem(last=False)
        return True

    def find(self, request_id: str) -> Lookup | None:
        return self._running.get(request_id) or self._finished.get(request_id)


def _avoidable_ranges(lookup: LookupReport, misses: Misses) -> list[tuple[int, int, str]]:
    """Neighbouring blocks of one reason become one range."""
    ranges: list[tuple[int, int, str]] = []
    for block, reason in enumerate(misses.reasons, start=lookup.first_missing_block):
        if reason not in PENALTY_REASONS:
            continue
        start, end = block * lookup.block_size, (block + 1) * lookup.block_size
        if ranges and ranges[-1][1] == start and ranges[-1][2] == reason:
            ranges[-1] = (ranges[-1][0], end, reason)
        else:
            ranges.append((start, end, reason))
    return ranges
