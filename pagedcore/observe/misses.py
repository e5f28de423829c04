"""Why each eligible block of a lookup was not served: exactly one reason, the first that applies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pagedcore.core.lookup import BlockHash, LookupReport
from pagedcore.observe.ghosts import BlockHistory

BEHIND_ISOLATED = ("short", "diverged", "cold")
"""Reasons that `isolated` goes before: what the block would be without the other tenants and salts."""


@dataclass(frozen=True, slots=True)
class Misses:
    """The missed eligible blocks of one lookup, in order of position."""

    reasons: tuple[str, ...] = ()
    num_ghost_hits: int = 0
    diverged_at_token: int | None = None
    """First prompt token that differs from the nearest prefix cached for this request, when the first miss is `short` or `diverged`,
    or would be without the others where it is `isolated`."""
    evicted_age_s: float | None = None
    """Seconds since the first missing block was evicted, when the first miss is `evicted`."""

    def by_reason(self) -> dict[str, int]:
        return dict(Counter(self.reasons))


def explain_misses(lookup: LookupReport, history: BlockHistory, now_s: float, isolated: frozenset[int] = frozenset()) -> Misses:
    """Name the reason of each missed block. Changes nothing.

    In order: `disabled` (the request may not read the cache: all its blocks), `hole` (resident behind a missing block),
    `in_flight` (another request computes it now), `evicted` (a ghost), `isolated` (its number is in `isolated`: another salt or
    tenant holds the same tokens); then, at the first missing block i only and when a resident block with the same parent shares its
    first c tokens: `short` if i == 0 and c >= 1 (something is shared, but less than one block), `diverged` if i > 0 (also with
    c == 0: the prompts part at the block's border); else `cold`. The divergence is told behind `isolated`, too: what a tenant reads
    must be what it would be without the others, or it says what they sent.

    Example, block size 4, cached [1 2 3 4][5 6 7 8] and nothing evicted:

    - 1 2 3 4 5 6 9 9 0: block 0 is served, block 1 is `diverged`, c = 2, so at token 1 * 4 + 2 = 6;
    - 1 2 9 9 5 6 7 8 0: block 0 is `short` at token 2, block 1 is `cold` (another parent, so another hash);
    - 9 9 9 9 5 6 7 8 0: both are `cold`: nothing is shared;
    - 1 2 3 4 5 6 7 8 1 2 3 4 0: two served; block 2 is `cold`, since no cached prompt went on from there.
    """
    if lookup.caching_disabled:
        return Misses(("disabled",) * lookup.num_eligible_blocks)
    if not lookup.missed:
        return Misses()
    evicted_at = [None if is_resident else history.evicted_at(block_hash) for block_hash, is_resident, _ in lookup.missed]
    reasons = [_reason(block, evicted_s) for block, evicted_s in zip(lookup.missed, evicted_at, strict=True)]
    diverged_at_token = None
    if reasons[0] == "cold":
        reasons[0], diverged_at_token = _first_miss(lookup)
    for number in isolated:
        reasons[number] = "isolated" if reasons[number] in BEHIND_ISOLATED else reasons[number]
    age_s = now_s - evicted_at[0] if reasons[0] == "evicted" and evicted_at[0] is not None else None
    num_ghost_hits = len(evicted_at) - evicted_at.count(None)
    return Misses(tuple(reasons), num_ghost_hits, diverged_at_token, age_s)


def _reason(block: tuple[BlockHash, bool, bool], evicted_s: float | None) -> str:
    _, is_resident, is_computing = block
    if is_resident:
        return "hole"
    if is_computing:
        return "in_flight"
    return "cold" if evicted_s is None else "evicted"


def _first_miss(lookup: LookupReport) -> tuple[str, int | None]:
    """(reason, token at which the prompt leaves the nearest cached one) of a first missing block without a history."""
    common = lookup.sibling_common_tokens
    first = lookup.first_missing_block
    if common is None or (first == 0 and common == 0):
        return "cold", None
    return ("diverged" if first else "short"), first * lookup.block_size + common
