"""The catalogue is a promise to dashboards: names, types, labels and the values of labels change here or nowhere."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pagedcore.observe.catalogue import FAMILIES, MISS_REASONS, Family

LEVELS, WINDOWS = {"page", "prefix", "pool"}, {"1m", "total"}
MISSES = {"disabled", "hole", "in_flight", "evicted", "isolated", "short", "diverged", "cold"}
WAITS = {"blocks", "max_num_seqs", "token_budget", "tenant_quota", "priority", "batch_window", "next_step"}
ADAPTERS = {"library", "litserve", "bentoml", "langchain"}
REFUSALS = {"too_long", "pool_too_small", "queue_full", "tenant_quota", "deadline", "invalid"}
OPEN: set[str] = set()
"""Values that callers name, up to a bound."""

PROMISED: dict[str, tuple[str, dict[str, set[str]]]] = {
    "cache_hit_rate": ("gauge", {}),
    "cache_level_hit_rate": ("gauge", {"level": LEVELS, "window": WINDOWS}),
    "cache_ideal_hit_rate": ("gauge", {"window": WINDOWS}),
    "page_lookups_total": ("counter", {}),
    "page_hits_total": ("counter", {}),
    "prefix_cache_queries_tokens_total": ("counter", {"tenant": OPEN}),
    "prefix_cache_hit_tokens_total": ("counter", {"source": {"live", "pool", "host"}, "tenant": OPEN}),
    "prefix_cache_ideal_hit_tokens_total": ("counter", {}),
    "computed_prompt_tokens_total": ("counter", {}),
    "abandoned_prompt_tokens_total": ("counter", {}),
    "pool_acquired_blocks_total": ("counter", {"kind": {"reused", "fresh"}}),
    "pool_ghost_hits_total": ("counter", {}),
    "pool_evictions_total": ("counter", {}),
    "cache_miss_blocks_total": ("counter", {"reason": MISSES}),
    "miss_penalty_tokens_total": ("counter", {"reason": {"evicted", "in_flight"}}),
    "miss_penalty_seconds_total": ("counter", {"reason": {"evicted", "in_flight"}}),
    "block_reuses": ("histogram", {}),
    "block_lifetime_seconds": ("histogram", {}),
    "block_idle_seconds": ("histogram", {}),
    "block_reuse_gap_seconds": ("histogram", {}),
    "blocks": ("gauge", {"state": {"active", "cached", "free"}}),
    "kv_cache_usage_ratio": ("gauge", {}),
    "kv_utilization_ratio": ("gauge", {}),
    "swapped_blocks_total": ("counter", {"direction": {"out", "in"}}),
    "open_requests": ("gauge", {"state": {"waiting", "running", "swapped"}}),
    "waiting_requests": ("gauge", {"reason": WAITS}),
    "received_requests_total": ("counter", {"adapter": ADAPTERS, "tenant": OPEN, "class": OPEN}),
    "requests_total": (
        "counter",
        {
            "status": {"completed", "aborted", "rejected", "error"},
            "finish_reason": {"stop", "length", ""},
            "adapter": ADAPTERS,
            "tenant": OPEN,
            "class": OPEN,
        },
    ),
    "rejected_requests_total": ("counter", {"reason": REFUSALS}),
    "preemptions_total": ("counter", {}),
    "recomputed_tokens_total": ("counter", {}),
    "discarded_tokens_total": ("counter", {}),
    "prompt_tokens_total": ("counter", {"tenant": OPEN}),
    "generation_tokens_total": ("counter", {"tenant": OPEN}),
    "time_in_queue_seconds": ("histogram", {}),
    "time_to_first_token_seconds": ("histogram", {}),
    "inter_token_latency_seconds": ("histogram", {}),
    "time_per_output_token_seconds": ("histogram", {}),
    "request_latency_seconds": ("histogram", {}),
    "step_seconds": ("histogram", {}),
    "step_gap_seconds": ("histogram", {}),
    "step_tokens": ("histogram", {}),
    "step_sequences": ("histogram", {}),
    "device_memory_bytes": ("gauge", {"kind": {"weights", "kv_cache", "graphs", "activations", "total"}}),
    "device_utilization_ratio": ("gauge", {}),
}
"""Beside pagedcore_engine_info, whose labels are the engine's settings."""


def test_the_families_are_the_promised_ones() -> None:
    assert set(FAMILIES) == {f"pagedcore_{name}" for name in PROMISED} | {"pagedcore_engine_info"}


@pytest.mark.parametrize("name", PROMISED)
def test_a_family_has_its_type_its_labels_and_their_values(name: str) -> None:
    kind, labels = PROMISED[name]
    family = FAMILIES[f"pagedcore_{name}"]
    assert (family.kind, family.labels) == (kind, tuple(labels))
    for position, values in enumerate(labels.values()):
        shown = {child[position] for child in family.children}
        assert shown == (values or {""}) or not family.children


def test_the_order_of_reasons_is_that_in_which_they_are_tried() -> None:
    assert MISS_REASONS == ("disabled", "hole", "in_flight", "evicted", "isolated", "short", "diverged", "cold")


def test_the_engine_says_what_it_is_made_of() -> None:
    family = FAMILIES["pagedcore_engine_info"]
    assert {"version", "backend", "block_size", "kv_cache_dtype", "quantization"} <= set(family.labels)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("time_to_first_token_seconds", 0.001, 600.0),
        ("time_in_queue_seconds", 0.001, 600.0),
        ("request_latency_seconds", 0.001, 600.0),
        ("inter_token_latency_seconds", 0.0002, 5.0),
        ("time_per_output_token_seconds", 0.0002, 5.0),
        ("step_seconds", 0.0002, 5.0),
        ("step_gap_seconds", 0.00002, 1.0),
        ("block_lifetime_seconds", 0.01, 86_400.0),
        ("block_idle_seconds", 0.01, 86_400.0),
        ("block_reuse_gap_seconds", 0.01, 86_400.0),
        ("block_reuses", 0.0, 1000.0),
        ("step_tokens", 1.0, 32_768.0),
        ("step_sequences", 1.0, 2048.0),
    ],
)
def test_buckets_reach_from_the_shortest_to_the_longest_that_there_is(name: str, least: float, most: float) -> None:
    buckets = FAMILIES[f"pagedcore_{name}"].buckets
    assert (buckets[0], buckets[-1]) == (least, most)
    assert list(buckets) == sorted(set(buckets))
    # A quantile is read between two bounds: none is more than ten times the one before.
    assert all(upper <= 10 * lower for lower, upper in pairwise(buckets[1:]))


def names_of(kind: str) -> list[str]:
    return [family.name for family in FAMILIES.values() if family.kind == kind]


def test_names_follow_prometheus_conventions() -> None:
    assert all(name.endswith("_total") for name in names_of("counter"))
    assert not any(name.endswith(("_total", "_count", "_sum", "_bucket")) for name in (*names_of("gauge"), *names_of("histogram")))
    assert not any(unit in name for name in FAMILIES for unit in ("_ms", "_percent", "_mib", "_gib", "_minutes"))


def test_tenant_and_class_stand_on_counters_only() -> None:
    def has_open_label(family: Family) -> bool:
        return bool({"tenant", "class", "adapter"} & set(family.labels))

    assert [family.name for family in FAMILIES.values() if has_open_label(family) and family.kind != "counter"] == []
