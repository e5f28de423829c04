"""The bench of the routing policies, small: what affinity gains, and what it may cost."""

from __future__ import annotations

import pytest

from bench.routing import POLICIES, Result, make_traffic, simulate

NUM_WORKERS = 4


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    turns = make_traffic(num_conversations=60, rate=40.0)
    return {name: simulate(name, turns, NUM_WORKERS, num_blocks=700) for name in POLICIES}


def test_affinity_finds_far_more_in_the_caches_than_either_other_policy(results: dict[str, Result]) -> None:
    affine = results["prefix-affine"].hit_rate
    assert affine > results["round robin"].hit_rate + 0.1
    assert affine > results["least loaded"].hit_rate + 0.1
    assert 0.0 < results["round robin"].hit_rate < affine < 1.0


def test_affinity_never_loads_a_worker_beyond_its_limit(results: dict[str, Result]) -> None:
    assert results["prefix-affine"].max_excess <= 0
    assert results["prefix-affine"].max_over_mean_load < 2.5


def test_all_policies_see_the_same_traffic_and_it_can_be_repeated(results: dict[str, Result]) -> None:
    turns = make_traffic(num_conversations=60, rate=40.0)
    assert simulate("prefix-affine", turns, NUM_WORKERS, num_blocks=700) == results["prefix-affine"]
    assert make_traffic(num_conversations=3, rate=40.0, seed=1) != make_traffic(num_conversations=3, rate=40.0)
