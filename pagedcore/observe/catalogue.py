"""Every metric family, defined once: name, type, help, labels, buckets, and the children that exist from the start."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

PREFIX = "pagedcore_"

BASE_LABELS = ("model_name", "engine")
"""On every family: the served model, and the engine instance (worker or replica)."""

UNNAMED = ""
"""Value of `tenant` and `class` for a request without one. Prometheus reads an empty label as absent."""

ADAPTERS = ("library", "litserve", "bentoml", "langchain")
ENDINGS = (("completed", "stop"), ("completed", "length"), ("aborted", ""), ("rejected", ""), ("error", ""))
"""(status, finish_reason) of ended requests; only a completed one has a finish_reason to count."""
SOURCES = ("live", "pool", "host")
LEVELS = ("page", "prefix", "pool")
WINDOWS = ("1m", "total")
MISS_REASONS = ("disabled", "hole", "in_flight", "evicted", "isolated", "short", "diverged", "cold")
"""In the order in which they are tried: a block has the first that applies."""
PENALTY_REASONS = ("evicted", "in_flight")
BLOCK_STATES = ("active", "cached", "free")
REQUEST_STATES = ("waiting", "running", "swapped")
WAITING_REASONS = ("blocks", "max_num_seqs", "token_budget", "tenant_quota", "priority", "batch_window", "next_step")
REJECT_REASONS = ("too_long", "pool_too_small", "queue_full", "tenant_quota", "deadline", "invalid")
MEMORY_KINDS = ("weights", "kv_cache", "graphs", "activations", "total")
INFO_LABELS = ("version", "backend", "block_size", "num_blocks", "kv_cache_dtype", "dtype", "quantization", "linear_backend", "device")

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
GAP_BUCKETS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
AGE_BUCKETS = (0.01, 0.1, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)
REUSE_BUCKETS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0)
COUNT_BUCKETS = tuple(float(2**i) for i in range(16))

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family. `name` is the name of its samples (counters end in `_total`)."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """Beside `BASE_LABELS`."""
    children: tuple[tuple[str, ...], ...] = ((),)
    """Label values that exist, at 0, before anything happens."""
    buckets: tuple[float, ...] = ()


def _counter(name: str, help_text: str, **labels: tuple[str, ...]) -> Family:
    return _family(name, "counter", help_text, labels)


def _gauge(name: str, help_text: str, **labels: tuple[str, ...]) -> Family:
    return _family(name, "gauge", help_text, labels)


def _histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Family:
    return Family(PREFIX + name, "histogram", help_text, buckets=buckets)


def _family(name: str, kind: Kind, help_text: str, labels: dict[str, tuple[str, ...]]) -> Family:
    return Family(PREFIX + name, kind, help_text, tuple(labels), tuple(product(*labels.values())))


_TENANT = (UNNAMED,)

_CACHE = (
    # The gauge a small script greps: no other family's name or help may hold its name.
    _gauge(
        "cache_hit_rate", "Prompt tokens served by the prefix cache over prompt tokens looked up, since start; NaN before the first lookup."
    ),
    _gauge(
        "cache_level_hit_rate", "Hit rate of one cache level in a window; NaN where nothing was looked up.", level=LEVELS, window=WINDOWS
    ),
    _gauge("cache_ideal_hit_rate", "Prefix hit rate of an unbounded cache on the same traffic; 0 while caching is off.", window=WINDOWS),
    _counter("page_lookups_total", "Eligible prompt blocks looked up, each probed by itself."),
    _counter("page_hits_total", "Eligible prompt blocks that were resident on the device."),
    _counter("prefix_cache_queries_tokens_total", "Prompt tokens looked up, once a request, at its first admission.", tenant=_TENANT),
    _counter("prefix_cache_hit_tokens_total", "Prompt tokens skipped, by where they came from.", source=SOURCES, tenant=_TENANT),
    _counter("prefix_cache_ideal_hit_tokens_total", "Prompt tokens that an unbounded cache would have skipped, of those looked up."),
    _counter("computed_prompt_tokens_total", "Prompt tokens of looked-up requests that were computed for the first time."),
    _counter("abandoned_prompt_tokens_total", "Prompt tokens of looked-up requests never computed, since the request ended first."),
    _counter("pool_acquired_blocks_total", "Block acquisitions, served by a cached block or by a fresh one.", kind=("reused", "fresh")),
    _counter("pool_ghost_hits_total", "Missed blocks whose hash was evicted within the remembered history."),
    _counter("pool_evictions_total", "Cached blocks that lost their hash to make room."),
    _counter("cache_miss_blocks_total", "Eligible blocks that were not served, each with one reason.", reason=MISS_REASONS),
    _counter("miss_penalty_tokens_total", "Computed tokens whose block had been computed before.", reason=PENALTY_REASONS),
    _counter("miss_penalty_seconds_total", "Share of step time spent on avoidable tokens.", reason=PENALTY_REASONS),
    _histogram("block_reuses", "Acquisitions by another request than the writer, at eviction of a block.", REUSE_BUCKETS),
    _histogram("block_lifetime_seconds", "From the filling of a block to its eviction.", AGE_BUCKETS),
    _histogram("block_idle_seconds", "From the last use of a block to its eviction.", AGE_BUCKETS),
    _histogram("block_reuse_gap_seconds", "Between two acquisitions of a cached block.", AGE_BUCKETS),
    _gauge("blocks", "Blocks of the KV pool: active (owned), cached (no owner, still hashed), free.", state=BLOCK_STATES),
    _gauge("kv_cache_usage_ratio", "Active blocks over all blocks."),
    _gauge("kv_utilization_ratio", "Live tokens over the slots of active blocks; 0 where none is active."),
    _counter("swapped_blocks_total", "Blocks copied to host memory (out) and back (in).", direction=("out", "in")),
)

_REQUESTS = (
    # Not `requests`: that is what prometheus_client calls the family of `requests_total`.
    _gauge(
        "open_requests",
        "Requests now in the engine, each in one state; each choice of n counts. Swapped: preempted, with blocks copied to host memory.",
        state=REQUEST_STATES,
    ),
    _gauge("waiting_requests", "Waiting requests by what they wait for.", reason=WAITING_REASONS),
    Family(
        PREFIX + "received_requests_total",
        "counter",
        "Requests that came to the engine: those that ended, those that it has open, and those that it has not taken yet.",
        ("adapter", "tenant", "class"),
        tuple((adapter, UNNAMED, UNNAMED) for adapter in ADAPTERS),
    ),
    Family(
        PREFIX + "requests_total",
        "counter",
        "Ended requests, one terminal event each. Completed ones: stop, or length when max_tokens or the context ended a choice.",
        ("status", "finish_reason", "adapter", "tenant", "class"),
        tuple((*ending, adapter, UNNAMED, UNNAMED) for ending in ENDINGS for adapter in ADAPTERS),
    ),
    _counter("rejected_requests_total", "Requests that the engine refused; none that a door refuses comes to it.", reason=REJECT_REASONS),
    _counter("preemptions_total", "Requests that gave their blocks back to be computed again."),
    _counter("recomputed_tokens_total", "Tokens computed again after a preemption."),
    _counter("discarded_tokens_total", "Tokens generated past a stop string or in flight when their request ended."),
    _counter("prompt_tokens_total", "Prompt tokens of admitted requests; n choices of one prompt count it once.", tenant=_TENANT),
    _counter("generation_tokens_total", "Output tokens of ended requests; each choice of n counts.", tenant=_TENANT),
    _histogram("time_in_queue_seconds", "Arrival to first admission.", LATENCY_BUCKETS),
    _histogram("time_to_first_token_seconds", "Arrival to first token.", LATENCY_BUCKETS),
    _histogram("inter_token_latency_seconds", "Between two tokens of one output.", TOKEN_BUCKETS),
    _histogram("time_per_output_token_seconds", "(last - first token) / (tokens - 1), one an output.", TOKEN_BUCKETS),
    _histogram("request_latency_seconds", "Arrival to end, of every request but rejected ones.", LATENCY_BUCKETS),
)

_ENGINE = (
    _histogram("step_seconds", "One device step, from its start to its commit.", TOKEN_BUCKETS),
    _histogram("step_gap_seconds", "From a commit to the start of the next step while requests run.", GAP_BUCKETS),
    _histogram("step_tokens", "Tokens of one step.", COUNT_BUCKETS),
    _histogram("step_sequences", "Sequences of one step.", COUNT_BUCKETS[:12]),
    _gauge("device_memory_bytes", "Device memory that the engine holds, by use.", kind=MEMORY_KINDS),
    Family(
        PREFIX + "device_utilization_ratio",
        "gauge",
        "Share of the last second in which a kernel ran on the device, by its driver (NVML); absent where that cannot be asked.",
        children=(),
    ),
    Family(PREFIX + "engine_info", "gauge", "1 for a running engine; its settings are the labels.", INFO_LABELS, children=()),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _CACHE + _REQUESTS + _ENGINE}
