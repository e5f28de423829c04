"""Why one request hit or missed the prefix cache, as plain values and as sentences."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pagedcore.observe.catalogue import MISS_REASONS
from pagedcore.outputs import CacheReport

_OPERATORS_ONLY = "isolated"
"""A miss reason that would tell a tenant what others sent; a tenant reads what it would be without the others: also whether his own
cached prompts came close, since a divergence that is missing would tell as much."""

_SOURCES = ("live", "pool", "host", "computed", "abandoned")

_MEANINGS = {
    "disabled": "caching was off for this request",
    "hole": "they were resident behind a missing block: the head of their prefix was evicted before its tail",
    "in_flight": "another request was computing them at that moment",
    "evicted": "they had been cached and were dropped to make room",
    "isolated": "the same tokens were computed under another salt, tenant or adapter",
    "short": "the nearest cached prompt shares less than one block",
    "diverged": "the prompt left the nearest cached one inside that block",
    "cold": "nobody had sent them before, as far as is remembered",
}


def explain(request_id: str, report: CacheReport, reasons: tuple[str, ...], block_size: int) -> dict[str, Any]:
    """Tokens by source, the reason of each missed block, where the prompt left the cached ones, and the same in words."""
    first_missed = report.num_cached_tokens // block_size
    nearest = report.num_cached_tokens if report.diverged_at_token is None else report.diverged_at_token
    return {
        "request_id": request_id,
        "prompt_tokens": report.num_prompt_tokens,
        "block_size": block_size,
        "tokens": _by_source(report),
        "blocks": {"eligible": report.num_eligible_blocks, "resident": report.num_resident_blocks, "served": first_missed},
        "miss": dict(report.miss_blocks),
        "missed_blocks": _runs(reasons, first_missed, block_size),
        "first_divergence": None if report.diverged_at_token is None else {"token": report.diverged_at_token},
        "nearest_cached_prefix_tokens": nearest,
        "evicted_age_s": report.evicted_age_s,
        "sentences": _sentences(report, block_size),
    }


def cache_object(reports: Sequence[CacheReport]) -> dict[str, Any]:
    """The `cache` of an HTTP reply, summed over its prompts; the divergence is that of a single prompt. Safe for tenants."""
    misses: Counter[str] = Counter()
    for report in reports:
        misses.update(for_tenant(report, ())[0].miss_blocks)
    tokens = [_by_source(report) for report in reports]
    return {
        "tokens": {source: sum(one[source] for one in tokens) for source in _SOURCES},
        "miss": dict(misses),
        "first_divergence": reports[0].diverged_at_token if len(reports) == 1 else None,
    }


def for_tenant(report: CacheReport, reasons: tuple[str, ...]) -> tuple[CacheReport, tuple[str, ...]]:
    """A report and its reasons as they would be without what other tenants and salts hold."""
    miss = miss_for_tenant(report.miss_blocks, served=report.num_cached_tokens, diverged_at=report.diverged_at_token)
    shown = tuple("cold" if reason == _OPERATORS_ONLY else reason for reason in reasons)
    if reasons[:1] == (_OPERATORS_ONLY,):
        shown = (_first_reason(report.num_cached_tokens, report.diverged_at_token), *shown[1:])
    return dataclasses.replace(report, miss_blocks=miss), shown


def miss_for_tenant(miss: Mapping[str, int], *, served: int, diverged_at: int | None) -> dict[str, int]:
    """The same for counts, of a request with so many tokens served that left the nearest prompt of its own at that token. In an order
    that tells nothing either."""
    shown = Counter(miss)
    num_hidden = shown.pop(_OPERATORS_ONLY, 0)
    if num_hidden:
        is_first_hidden = diverged_at is not None and not shown.keys() & {"short", "diverged"}
        shown["cold"] += num_hidden - is_first_hidden
        shown[_first_reason(served, diverged_at)] += is_first_hidden
    return {reason: shown[reason] for reason in MISS_REASONS if shown[reason]}


def _first_reason(served: int, diverged_at: int | None) -> str:
    """Of the first missing block, where nothing but what is cached beside it says why."""
    if diverged_at is None:
        return "cold"
    return "diverged" if served else "short"


def _by_source(report: CacheReport) -> dict[str, int]:
    return {source: getattr(report, f"{source}_tokens") for source in _SOURCES}


def _runs(reasons: tuple[str, ...], first_missed: int, block_size: int) -> list[dict[str, Any]]:
    """Neighbouring blocks of one reason become one entry; both ends count."""
    runs: list[dict[str, Any]] = []
    for block, reason in enumerate(reasons, start=first_missed):
        if not runs or runs[-1]["reason"] != reason:
            runs.append({"reason": reason, "first_block": block, "first_token": block * block_size})
        runs[-1] |= {"last_block": block, "last_token": (block + 1) * block_size - 1}
    return runs


def _sentences(report: CacheReport, block_size: int) -> list[str]:
    cached, total = report.num_cached_tokens, report.num_prompt_tokens
    lines = [f"{cached:,} of {total:,} prompt tokens came from the cache."]
    if not report.num_eligible_blocks:
        return [*lines, f"The prompt is no longer than one block of {block_size} tokens, so there was nothing to look up."]
    lines += [f"{_blocks(count)} missed: {_MEANINGS.get(reason, reason)}." for reason, count in report.miss_blocks.items()]
    if report.diverged_at_token is not None:
        lines.append(f"The nearest cached prompt is the same up to token {report.diverged_at_token:,}.")
    if report.evicted_age_s is not None:
        lines.append(f"The first missing block was evicted {report.evicted_age_s:,.1f} s before; a larger pool might have kept it.")
    return lines


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count:,} blocks"
