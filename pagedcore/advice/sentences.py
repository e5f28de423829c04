"""The curve and the findings in words: at most a few sentences, each with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedcore.advice.divergence import Divergence
from pagedcore.advice.reuse_sketch import CurvePoint
from pagedcore.readable import percent

MIN_GAIN = 0.02
"""A change is advised for two points at least."""

MIN_LOOKUPS = 16
"""Of fewer prompts nothing is concluded."""

SMALL_GAP = 0.05
"""Nearer than this to the ideal is as well as can be."""

MOST_OF_THE_GAIN = 0.9

MIN_PREEMPTED_SHARE = 0.01
"""Preemptions for each prompt from which on the pool is too small for what runs at once."""

MAX_DIVERGENCES = 2

_SIZES = {2.0: "twice as large", 4.0: "four times as large", 8.0: "eight times as large"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What there is to say something about."""

    curve: Sequence[CurvePoint]
    block_size: int
    hit_rate: float | None
    ideal_hit_rate: float | None
    num_lookups: int
    divergences: Sequence[Divergence]
    is_caching_on: bool
    shared_tail_tokens: float | None
    """Tokens by which shared prefixes reach into the first block that is not shared, on average; None where nothing is known."""
    has_host_tier: bool = False
    """The pool of the curve is then the device's and host memory together."""
    num_preemptions: int = 0

    def rate(self, factor: float, block_size: int) -> float | None:
        return next((p.hit_rate for p in self.curve if (p.pool_factor, p.block_size) == (factor, block_size)), None)


def write_sentences(findings: Findings) -> tuple[str, ...]:
    """What to change, the largest lever first; or that there is nothing to change."""
    if findings.hit_rate is None:
        return ("No request has been looked up yet, so there is nothing to advise.",)
    if findings.num_lookups < MIN_LOOKUPS:
        return (f"Advice needs {MIN_LOOKUPS} prompts; {findings.num_lookups} were looked up so far.",)
    if not findings.is_caching_on:
        return _caching(findings)
    advised = [*_preemptions(findings), *_pool(findings), *_block_size(findings), *_prompts(findings)]
    return tuple(advised) or (_nothing(findings, findings.hit_rate),)


def _caching(findings: Findings) -> tuple[str, ...]:
    rate = findings.rate(1.0, findings.block_size)
    gain = "" if rate is None else f"; with it, this pool would serve {percent(rate)} of the prompt tokens"
    return (f"Prefix caching is off{gain}.",)


def _preemptions(findings: Findings) -> list[str]:
    """Who waits for blocks, or loses them, runs in another order than in a larger pool, which would hold more at once."""
    if findings.num_preemptions < MIN_PREEMPTED_SHARE * findings.num_lookups:
        return []
    happened = f"Requests took blocks from each other ({findings.num_preemptions:,} preemptions, {findings.num_lookups:,} prompts)"
    return [f"{happened}: what runs at once needs a larger pool or a lower max_num_seqs, and until then the predicted rates are rough."]


def _pool(findings: Findings) -> list[str]:
    points = [point for point in findings.curve if point.block_size == findings.block_size]
    now = findings.rate(1.0, findings.block_size)
    if now is None:
        return []
    larger = [point for point in points if point.pool_factor > 1]
    gain = max((point.hit_rate - now for point in larger), default=0.0)
    if gain < MIN_GAIN:
        return []
    best = next(point for point in larger if point.hit_rate - now >= MOST_OF_THE_GAIN * gain)
    name = f"A pool {_SIZES[best.pool_factor]} (num_kv_blocks={best.num_blocks})"
    if findings.has_host_tier:
        name = f"Pool and swap_space together {_SIZES[best.pool_factor]} ({best.num_blocks} blocks)"
    return [f"{name} would raise the hit rate from {percent(now)} to {percent(best.hit_rate)}."]


def _block_size(findings: Findings) -> list[str]:
    now = findings.rate(1.0, findings.block_size)
    others = [point for point in findings.curve if point.pool_factor == 1.0 and point.block_size != findings.block_size]
    best = max(others, key=lambda point: point.hit_rate, default=None)
    if now is None or best is None or best.hit_rate - now < MIN_GAIN:
        return []
    sentence = f"Block size {best.block_size} would gain {points_of(best.hit_rate - now)}"
    if best.block_size < findings.block_size and findings.shared_tail_tokens is not None:
        sentence += f": shared prefixes end {round(findings.shared_tail_tokens)} tokens into a block on average"
    return [sentence + "."]


def _prompts(findings: Findings) -> list[str]:
    return [
        f"The prompts {_whose(found.tenant)} diverge at token {found.token:,}, before a shared body of {found.num_body_tokens:,} tokens: "
        "move what varies behind it."
        for found in findings.divergences[:MAX_DIVERGENCES]
    ]


def _nothing(findings: Findings, hit_rate: float) -> str:
    ideal = hit_rate if findings.ideal_hit_rate is None else max(findings.ideal_hit_rate, hit_rate)
    if ideal - hit_rate <= SMALL_GAP:
        return f"The cache needs no change: it serves {percent(hit_rate)} of a possible {percent(ideal)}."
    return (
        f"The hit rate is {percent(hit_rate)} of a possible {percent(ideal)}, and neither a pool up to eight times as large "
        "nor another block size would raise it by two points."
    )


def _whose(tenant: str | None) -> str:
    return "without a tenant" if tenant is None else f"of tenant {tenant}"


def points_of(gain: float) -> str:
    return f"{round(100 * gain)} points"
