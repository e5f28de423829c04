"""The property of the core: however requests are scheduled, each gets the tokens that it would get alone."""

from __future__ import annotations

from collections import Counter

import pytest

from support.scenarios import check_outcome, make_scenario, rare_paths, run_scenario

NUM_GROUPS, NUM_QUICK_GROUPS = 8, 2
SEEDS_PER_GROUP = 30
GROUPS = [pytest.param(group, marks=[] if group < NUM_QUICK_GROUPS else pytest.mark.slow) for group in range(NUM_GROUPS)]

_paths: dict[tuple[int, bool], Counter[str]] = {}


def run_group(group: int, *, has_host_tier: bool) -> Counter[str]:
    """Run one group of seeds once; returns how often each rare path was taken."""
    key = (group, has_host_tier)
    if key not in _paths:
        paths: Counter[str] = Counter()
        for seed in range(group * SEEDS_PER_GROUP, (group + 1) * SEEDS_PER_GROUP):
            scenario = make_scenario(seed, has_host_tier=has_host_tier)
            driver = run_scenario(scenario)
            check_outcome(scenario, driver)
            paths += rare_paths(scenario, driver)
        _paths[key] = paths
    return _paths[key]


@pytest.mark.parametrize("has_host_tier", [False, True], ids=["no host tier", "host tier"])
@pytest.mark.parametrize("group", GROUPS)
def test_every_request_gets_the_tokens_it_would_get_alone(group: int, has_host_tier: bool) -> None:
    assert run_group(group, has_host_tier=has_host_tier)["overlap"] > 0


@pytest.mark.parametrize("has_host_tier", [False, True], ids=["no host tier", "host tier"])
def test_the_runs_took_every_rare_path(has_host_tier: bool) -> None:
    """The first groups already, which `make check` runs."""
    paths = sum((run_group(group, has_host_tier=has_host_tier) for group in range(NUM_QUICK_GROUPS)), Counter())
    expected = {
        "preemption",
        "resume",
        "protected",
        "eviction",
        "live hit",
        "pool hit",
        "in flight miss",
        "chunked prefill",
        "prefix wait",
        "bypass",
        "stall",
        "deferred free",
        "discarded token",
        "abort",
        "error",
        "stop",
        "abandoned",
        "overlap",
    } | ({"host hit", "swapped out", "swapped in", "failed copy"} if has_host_tier else set())
    assert {path for path in expected if paths[path] > 0} == expected
