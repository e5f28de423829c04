"""One frozen snapshot of every number of one engine; subtract two for what happened between."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pagedcore.observe.window import ratio

Level = Literal["page", "prefix", "pool"]

_GAUGE = {"is_gauge": True}


def _counts() -> Mapping[str, int]:
    return field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsSnapshot:
    """Counters since the engine's start, and gauges of the moment. `later - earlier` subtracts the counters and keeps the later gauges."""

    elapsed_s: float = 0.0
    """Seconds that the counters cover."""
    num_steps: int = 0
    num_finished: Mapping[str, int] = _counts()
    """Status (completed, aborted, rejected, error) -> ended requests; n choices are one request."""
    num_rejected: Mapping[str, int] = _counts()
    """Reason -> rejected requests."""
    num_preemptions: int = 0
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    prefix_cache_hit_tokens_by_source: Mapping[str, int] = _counts()
    """live, pool, host -> tokens."""
    ideal_hit_tokens: int = 0
    """Prompt tokens that an unbounded cache would have served."""
    computed_prompt_tokens: int = 0
    """Of ended requests. Queries = hits + computed + abandoned when nothing runs."""
    abandoned_prompt_tokens: int = 0
    page_lookups: int = 0
    page_hits: int = 0
    pool_acquired_reused_blocks: int = 0
    pool_acquired_fresh_blocks: int = 0
    pool_ghost_hits: int = 0
    pool_evictions: int = 0
    miss_blocks: Mapping[str, int] = _counts()
    """Reason -> eligible blocks that were not served."""
    swapped_blocks: Mapping[str, int] = _counts()
    """out, in -> blocks copied to host memory and back."""
    miss_penalty_tokens: Mapping[str, int] = _counts()
    miss_penalty_seconds: Mapping[str, float] = field(default_factory=dict)
    prompt_tokens: int = 0
    """Of admitted requests; n choices of one prompt count it once."""
    generation_tokens: int = 0
    """Of ended requests; each choice of n counts."""
    sampled_tokens: int = 0
    """Drawn so far, also for requests that still run, and those that a stop string discards."""
    recomputed_tokens: int = 0
    discarded_tokens: int = 0

    num_running: int = field(default=0, metadata=_GAUGE)
    num_waiting: int = field(default=0, metadata=_GAUGE)
    num_waiting_by_reason: Mapping[str, int] = field(default_factory=dict, metadata=_GAUGE)
    num_active_blocks: int = field(default=0, metadata=_GAUGE)
    num_cached_blocks: int = field(default=0, metadata=_GAUGE)
    num_free_blocks: int = field(default=0, metadata=_GAUGE)
    kv_cache_usage: float = field(default=0.0, metadata=_GAUGE)
    """Active blocks over all blocks."""
    kv_utilization: float = field(default=0.0, metadata=_GAUGE)
    """Live tokens over the slots of active blocks."""
    device_memory_bytes: int = field(default=0, metadata=_GAUGE)
    device_memory_bytes_by_kind: Mapping[str, int] = field(default_factory=dict, metadata=_GAUGE)

    def hit_rate(self, level: Level = "prefix") -> float:
        """Hit rate of one cache level over the counters held here; NaN where nothing was looked up."""
        if level == "page":
            return ratio(self.page_hits, self.page_lookups)
        if level == "prefix":
            return ratio(self.prefix_cache_hit_tokens, self.prefix_cache_query_tokens)
        if level == "pool":
            reused = self.pool_acquired_reused_blocks
            return ratio(reused, reused + self.pool_acquired_fresh_blocks)
        raise ValueError(f"The cache level is {level!r} and must be 'page', 'prefix' or 'pool'.")

    @property
    def ideal_hit_rate(self) -> float:
        """Prefix hit rate of an unbounded cache on the same traffic; NaN where nothing was looked up."""
        return ratio(self.ideal_hit_tokens, self.prefix_cache_query_tokens)

    def __sub__(self, earlier: StatsSnapshot) -> StatsSnapshot:
        changes = {
            f.name: _difference(getattr(self, f.name), getattr(earlier, f.name))
            for f in dataclasses.fields(self)
            if "is_gauge" not in f.metadata
        }
        return dataclasses.replace(self, **changes)


def _difference(later: Any, earlier: Any) -> Any:
    if isinstance(later, Mapping):
        return {key: value - earlier.get(key, 0) for key, value in later.items()}
    return later - earlier
