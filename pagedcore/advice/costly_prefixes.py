"""Which prefixes were computed again and again because their blocks had been evicted."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_PREFIXES = 1024
NUM_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CostlyPrefix:
    """A prefix, and what its eviction cost."""

    prefix: str
    """The hash of its last evicted block, in hexadecimal digits."""
    tenant: str | None
    num_tokens: int
    """From the start of the prompt to the end of that block."""
    recomputed_tokens: int
    latest_request_id: str
    """The last one that computed evicted blocks of it again: a hash alone tells nobody which prompts these are."""
    num_requests: int = 1
    """How many did."""


class CostlyPrefixes:
    """Owns what each prefix cost. At `MAX_PREFIXES` the cheaper half is forgotten."""

    def __init__(self) -> None:
        self._by_prefix: dict[str, CostlyPrefix] = {}

    def __len__(self) -> int:
        return len(self._by_prefix)

    def add(self, paid: CostlyPrefix) -> None:
        """One request computed evicted blocks of this prefix again."""
        known = self._by_prefix.get(paid.prefix)
        if known is not None:
            paid = replace(
                paid,
                recomputed_tokens=known.recomputed_tokens + paid.recomputed_tokens,
                num_requests=known.num_requests + paid.num_requests,
            )
        self._by_prefix[paid.prefix] = paid
        if len(self._by_prefix) > MAX_PREFIXES:
            self._by_prefix = {kept.prefix: kept for kept in self._ranked()[: MAX_PREFIXES // 2]}

    def costliest(self) -> tuple[CostlyPrefix, ...]:
        """At most ten, the one that cost most first."""
        return tuple(self._ranked()[:NUM_SHOWN])

    def _ranked(self) -> list[CostlyPrefix]:
        return sorted(self._by_prefix.values(), key=lambda known: known.recomputed_tokens, reverse=True)
