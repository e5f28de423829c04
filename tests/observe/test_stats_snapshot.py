"""Snapshots: what the library shows without a scrape, and what happened between two of them."""

from __future__ import annotations

import dataclasses
import math
import pickle  # noqa: TID251

import pytest

from pagedcore.observe.stats import StatsSnapshot
from support.observed import Engine, make_lookup


def test_subtraction_is_what_happened_between_and_the_later_gauges() -> None:
    engine = Engine(device_memory_bytes={"weights": 10})
    engine.serve("r1", make_lookup("a", "b"))
    engine.step(num_running=5, num_free_blocks=3)
    before = engine.recorder.stats()
    engine.clock.now_s += 7.0
    engine.serve("r2", make_lookup("c", pool=2))
    engine.step(num_running=2, num_free_blocks=1, num_reused_acquisitions=2, num_fresh_acquisitions=2)
    between = engine.recorder.stats() - before
    assert between.elapsed_s == 7.0
    assert (between.prefix_cache_query_tokens, between.prefix_cache_hit_tokens) == (13, 8)
    assert between.miss_blocks["cold"] == 1
    assert between.num_finished == {"completed": 1, "aborted": 0, "rejected": 0, "error": 0}
    assert (between.num_running, between.num_free_blocks, between.device_memory_bytes) == (2, 1, 10)
    assert between.hit_rate("prefix") == 8 / 13
    assert between.hit_rate("page") == 2 / 3
    assert between.hit_rate("pool") == 2 / 4


def test_nothing_between_is_not_a_number() -> None:
    stats = Engine().recorder.stats()
    assert math.isnan((stats - stats).hit_rate("prefix"))


def test_a_snapshot_is_frozen_and_travels_between_processes() -> None:
    stats = Engine().recorder.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.num_running = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(stats)) == stats


def test_a_snapshot_does_not_change_afterwards() -> None:
    engine = Engine()
    before = engine.recorder.stats()
    engine.serve("r1", make_lookup("a"))
    assert before.num_finished["completed"] == 0
    assert before.miss_blocks["cold"] == 0


def test_an_unknown_level_is_an_error_that_names_the_levels() -> None:
    with pytest.raises(ValueError, match="'disk' and must be 'page', 'prefix' or 'pool'"):
        StatsSnapshot().hit_rate("disk")  # type: ignore[arg-type]
