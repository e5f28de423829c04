"""What an explanation says of one lookup, and what a tenant does not read."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from pagedcore.console.explanation import cache_object, explain, for_tenant, miss_for_tenant
from pagedcore.outputs import CacheReport

REPORT = CacheReport(
    num_prompt_tokens=50, num_eligible_blocks=12, num_resident_blocks=7, live_tokens=8, pool_tokens=16, computed_tokens=26,
    miss_blocks={"diverged": 1, "cold": 4, "hole": 1}, diverged_at_token=26,
)  # fmt: skip
REASONS = ("diverged", "cold", "cold", "hole", "cold", "cold")


def test_blocks_are_named_one_by_one_in_runs_that_cover_all_that_missed() -> None:
    answer = explain("a", REPORT, REASONS, 4)
    assert answer["blocks"] == {"eligible": 12, "resident": 7, "served": 6}
    assert answer["missed_blocks"] == [
        {"reason": "diverged", "first_block": 6, "first_token": 24, "last_block": 6, "last_token": 27},
        {"reason": "cold", "first_block": 7, "first_token": 28, "last_block": 8, "last_token": 35},
        {"reason": "hole", "first_block": 9, "first_token": 36, "last_block": 9, "last_token": 39},
        {"reason": "cold", "first_block": 10, "first_token": 40, "last_block": 11, "last_token": 47},
    ]


def test_tokens_by_source_add_up_to_the_prompt() -> None:
    answer = explain("a", REPORT, REASONS, 4)
    assert answer["tokens"] == {"live": 8, "pool": 16, "host": 0, "computed": 26, "abandoned": 0}
    assert sum(answer["tokens"].values()) == answer["prompt_tokens"]


def test_the_nearest_cached_prefix_ends_at_the_divergence_or_where_the_cache_did() -> None:
    diverged = explain("a", REPORT, REASONS, 4)
    assert (diverged["first_divergence"], diverged["nearest_cached_prefix_tokens"]) == ({"token": 26}, 26)
    cold = explain("a", replace(REPORT, diverged_at_token=None), REASONS, 4)
    assert (cold["first_divergence"], cold["nearest_cached_prefix_tokens"]) == (None, 24)


def test_the_words_hold_the_numbers() -> None:
    report = replace(
        REPORT, num_prompt_tokens=2050, miss_blocks={"evicted": 1, "in_flight": 3}, diverged_at_token=None, evicted_age_s=12.34
    )
    assert explain("a", report, (), 4)["sentences"] == [
        "24 of 2,050 prompt tokens came from the cache.",
        "1 block missed: they had been cached and were dropped to make room.",
        "3 blocks missed: another request was computing them at that moment.",
        "The first missing block was evicted 12.3 s before; a larger pool might have kept it.",
    ]


def test_a_prompt_of_one_block_had_nothing_to_look_up() -> None:
    report = CacheReport(num_prompt_tokens=4, computed_tokens=4)
    assert explain("a", report, (), 4)["sentences"][1].startswith("The prompt is no longer than one block of 4 tokens")


def test_a_tenant_reads_cold_where_others_hold_the_same_tokens() -> None:
    report = CacheReport(num_prompt_tokens=13, miss_blocks={"hole": 1, "isolated": 2, "cold": 1})
    shown, reasons = for_tenant(report, ("hole", "isolated", "isolated", "cold"))
    assert reasons == ("hole", "cold", "cold", "cold")
    assert shown.miss_blocks == {"hole": 1, "cold": 3}
    assert miss_for_tenant({"isolated": 2}, served=0, diverged_at=None) == {"cold": 2}
    assert miss_for_tenant({"hole": 1}, served=0, diverged_at=None) == {"hole": 1}


@pytest.mark.parametrize(("served", "diverged_at", "reason"), [(0, 3, "short"), (4, 4, "diverged"), (4, 7, "diverged"), (8, None, "cold")])
def test_what_a_tenant_reads_is_the_same_with_and_without_the_others(served: int, diverged_at: int | None, reason: str) -> None:
    """Every form of it, to the byte: a difference would tell him that somebody else has sent these tokens."""
    without = CacheReport(num_prompt_tokens=29, live_tokens=served, diverged_at_token=diverged_at)
    alone = (reason, "cold", "hole", "cold")
    shared = ("isolated", "isolated", "hole", "cold")

    def read(reasons: tuple[str, ...]) -> str:
        report, shown = for_tenant(replace(without, miss_blocks=dict(Counter(reasons))), reasons)
        counts = miss_for_tenant(dict(Counter(reasons)), served=served, diverged_at=diverged_at)
        return json.dumps([explain("a", report, shown, 4), counts, cache_object([report])])

    assert read(shared) == read(alone)


def test_the_cache_of_a_reply_sums_up_its_prompts_and_hides_what_is_for_operators() -> None:
    alone = cache_object([REPORT])
    assert alone == {
        "tokens": {"live": 8, "pool": 16, "host": 0, "computed": 26, "abandoned": 0},
        "miss": {"diverged": 1, "cold": 4, "hole": 1},
        "first_divergence": 26,
    }
    other = replace(REPORT, live_tokens=0, computed_tokens=34, miss_blocks={"isolated": 3}, diverged_at_token=None)
    assert cache_object([REPORT, other]) == {
        "tokens": {"live": 8, "pool": 32, "host": 0, "computed": 60, "abandoned": 0},
        "miss": {"diverged": 1, "cold": 7, "hole": 1},
        "first_divergence": None,
    }
    assert cache_object([])["tokens"]["computed"] == 0
