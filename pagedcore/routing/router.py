"""The decision: prefix affinity within a bound on the load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pagedcore.errors import ConfigError
from pagedcore.routing.known_prefixes import KnownPrefixes
from pagedcore.routing.prefix_keys import PrefixKey

Reason = Literal["only", "prefix", "overload", "load", "group"]
"""Why a worker got a request: no other is there; it knows the longest prefix; the one that does has too much to do; none knows any, and
it has least to do; the other choices of the request are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPolicy:
    """How far affinity may unbalance the workers. Raises `ConfigError` naming value and limit."""

    max_load_factor: float = 1.25
    """A worker with more than this times the mean number of open requests takes none for the sake of its cache."""
    free_load: int = 4
    """Up to so many open requests a worker is never overloaded: a step costs it no more than with one."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.max_load_factor < math.inf:
            raise ConfigError(f"max_load_factor is {self.max_load_factor!r} and must be a number of at least 1.")
        if not isinstance(self.free_load, int) or self.free_load < 1:
            raise ConfigError(f"free_load is {self.free_load!r} and must be an integer of at least 1.")

    def load_limit(self, num_open: int, num_workers: int) -> int:
        """The most open requests of one worker when there are `num_open` in all."""
        return max(self.free_load, math.ceil(self.max_load_factor * num_open / num_workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where a request goes, and why."""

    worker_id: int
    reason: Reason
    num_known_blocks: int = 0
    """Blocks of the prompt that this worker is believed to have."""


class Router:
    """Owns the loads of some workers, and what each is believed to have cached. Not thread-safe.

    No load that it knows exceeds `RoutingPolicy.load_limit` when a request is placed. Among workers that are equal to a request the
    one with fewest open ones takes it, then the one that the prompt's first block prefers: two routers that know as much agree.
    """

    def __init__(self, num_workers: int, num_blocks: int, policy: RoutingPolicy | None = None) -> None:
        """`num_blocks` is the size of each worker's pool."""
        self._policy = policy or RoutingPolicy()
        self._known = [KnownPrefixes(num_blocks) for _ in range(num_workers)]
        self._own = [0] * num_workers
        self._others: dict[int, Sequence[int]] = {}

    @property
    def own_loads(self) -> list[int]:
        """Open requests of each worker that came through this router."""
        return list(self._own)

    def load(self, worker_id: int) -> int:
        """Open requests of a worker, as far as this router knows."""
        return self._own[worker_id] + sum(loads[worker_id] for loads in self._others.values())

    def note_peer(self, peer: int, loads: Sequence[int]) -> None:
        """What came through another router of the same workers is this now."""
        self._others[peer] = loads

    def place(self, keys: Sequence[PrefixKey], workers: Sequence[int]) -> Choice:
        """Choose one of `workers`, of which there must be one, for a prompt. Its load grows, and it is believed to have the prompt."""
        choice = self._choose(keys, workers) if len(workers) > 1 else Choice(worker_id=workers[0], reason="only")
        self.learn(choice.worker_id, keys)
        self.take(choice.worker_id)
        return choice

    def take(self, worker_id: int) -> None:
        """One more request is open there, whatever this router thinks of it."""
        self._own[worker_id] += 1

    def release(self, worker_id: int) -> None:
        """A request there has ended."""
        self._own[worker_id] -= 1

    def learn(self, worker_id: int, keys: Sequence[PrefixKey]) -> None:
        """A worker has computed this prompt, or is about to."""
        self._known[worker_id].add(keys)

    def forget(self, worker_id: int) -> None:
        """A worker is gone with all that it had cached."""
        self._known[worker_id].clear()

    def _choose(self, keys: Sequence[PrefixKey], workers: Sequence[int]) -> Choice:
        loads = {one: self.load(one) for one in workers}
        limit = self._policy.load_limit(1 + sum(loads.values()), len(workers))
        counts = {one: self._known[one].count_leading(keys) for one in workers}
        free = [one for one in workers if loads[one] < limit]
        best = min(free, key=lambda one: (-counts[one], loads[one], _preference(keys, one)))
        if counts[best] < max(counts.values()):
            return Choice(worker_id=best, reason="overload", num_known_blocks=counts[best])
        return Choice(worker_id=best, reason="prefix" if counts[best] else "load", num_known_blocks=counts[best])


def _preference(keys: Sequence[PrefixKey], worker_id: int) -> int:
    """Rendezvous hashing: workers in an order that is a prompt's own, and that no other worker's coming or going changes."""
    first = keys[0] if keys else 0
    return hash((first, worker_id))
