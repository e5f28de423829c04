"""Hand-computed scenarios on a fake clock: each number, exactly. Block size 4 throughout."""

from __future__ import annotations

import math

import pytest

from pagedcore.core.events import Admitted, Arrived, BlockEvicted, FirstToken, Preempted, PrefillChunk, Resumed, StepEvents
from support.observed import Engine, block_hash, disabled_lookup, make_add, make_finished, make_lookup

COLD = make_lookup("a", "b", "c")  # 13 tokens, 3 eligible blocks, none cached


def test_the_three_cache_levels_and_the_sources() -> None:
    engine = Engine()
    engine.serve("r1", COLD)
    engine.serve("r2", make_lookup("x", "c!", live=1, pool=2, tail=3))  # 23 tokens: 12 served, 11 computed
    engine.step(num_reused_acquisitions=3, num_fresh_acquisitions=7)
    value = engine.value
    assert value("pagedcore_page_lookups_total") == 3 + 5
    assert value("pagedcore_page_hits_total") == 0 + 4
    assert value("pagedcore_prefix_cache_queries_tokens_total", tenant="") == 13 + 23
    assert value("pagedcore_prefix_cache_hit_tokens_total", source="live", tenant="") == 4
    assert value("pagedcore_prefix_cache_hit_tokens_total", source="pool", tenant="") == 8
    assert value("pagedcore_prefix_cache_hit_tokens_total", source="host", tenant="") == 0
    assert value("pagedcore_computed_prompt_tokens_total") == 13 + 11
    assert value("pagedcore_pool_acquired_blocks_total", kind="reused") == 3
    assert value("pagedcore_pool_acquired_blocks_total", kind="fresh") == 7
    assert value("pagedcore_cache_hit_rate") == 12 / 36
    assert value("pagedcore_cache_level_hit_rate", level="page", window="total") == 4 / 8
    assert value("pagedcore_cache_level_hit_rate", level="prefix", window="total") == 12 / 36
    assert value("pagedcore_cache_level_hit_rate", level="pool", window="total") == 3 / 10


def test_nothing_looked_up_is_not_a_number() -> None:
    engine = Engine()
    for level in ("page", "prefix", "pool"):
        for window in ("1m", "total"):
            assert math.isnan(engine.value("pagedcore_cache_level_hit_rate", level=level, window=window))
    assert math.isnan(engine.value("pagedcore_cache_hit_rate"))
    assert math.isnan(engine.recorder.stats().hit_rate("pool"))
    assert math.isnan(engine.recorder.stats().ideal_hit_rate)


def test_every_lookup_is_partitioned_and_every_missed_block_has_a_reason() -> None:
    engine = Engine()
    engine.step(BlockEvicted(block_hash("e"), 990.0, 0, 1.0, 1.0))
    engine.serve("r1", COLD)
    engine.serve("r2", make_lookup("e", "f?", "g!", live=2), abandoned=5)
    engine.serve("r3", make_lookup("d", pool=1, sibling=3))
    engine.serve("r4", make_lookup("s", sibling=1))
    engine.serve("r5", disabled_lookup(4))
    stats = engine.recorder.stats()
    by_source = stats.prefix_cache_hit_tokens_by_source
    assert stats.prefix_cache_query_tokens == 13 + 21 + 9 + 5 + 17
    assert by_source == {"live": 8, "pool": 4, "host": 0}
    assert stats.abandoned_prompt_tokens == 5
    assert stats.prefix_cache_query_tokens == stats.prefix_cache_hit_tokens + stats.computed_prompt_tokens + stats.abandoned_prompt_tokens
    each_once = dict.fromkeys(("hole", "in_flight", "evicted", "short", "diverged"), 1)
    assert stats.miss_blocks == {**each_once, "disabled": 4, "isolated": 0, "cold": 3}
    assert stats.page_lookups == sum(by_source.values()) // 4 + sum(stats.miss_blocks.values())
    assert stats.pool_ghost_hits == 1


def test_the_ideal_rate_is_that_of_a_cache_that_forgets_nothing() -> None:
    engine = Engine()
    engine.serve("r1", COLD)  # nothing seen
    engine.step(BlockEvicted(block_hash("b"), 990.0, 0, 1.0, 1.0))
    engine.serve("r2", make_lookup("b", "x", pool=1))  # a cached, b seen and gone, x new: 8 of 13 tokens
    assert engine.recorder.stats().prefix_cache_hit_tokens == 4
    assert engine.recorder.stats().ideal_hit_tokens == 8
    assert engine.value("pagedcore_cache_ideal_hit_rate", window="total") == 8 / 26


def test_a_request_that_was_never_admitted_touches_no_cache_number() -> None:
    engine = Engine()
    request = make_add("r1")
    engine.step(Arrived(request, 1000.0), make_finished(request, 1001.0, "aborted", num_abandoned_prompt_tokens=9))
    stats = engine.recorder.stats()
    assert (stats.prefix_cache_query_tokens, stats.abandoned_prompt_tokens, stats.prompt_tokens) == (0, 0, 0)
    assert stats.num_finished == {"completed": 0, "aborted": 1, "rejected": 0, "error": 0}


def test_latencies_of_one_request() -> None:
    engine = Engine()
    request = make_add("r1", num_tokens=13, arrival_s=1000.0)
    engine.step(Arrived(request, 1000.001))
    engine.step(Admitted("r1", 1000.5, COLD))
    engine.step(FirstToken("r1", 1002.0), step_id=1, num_tokens=13, num_sequences=1)
    for number in (2, 3):
        engine.step(step_id=number, num_tokens=1, num_sequences=1, num_generated_tokens=1, inter_token_gaps_s=[0.25])
    end = make_finished(request, 1003.0, num_output_tokens=3, first_token_s=1002.0, last_token_s=1002.5, num_computed_prompt_tokens=13)
    engine.step(end)
    for name, count, total in (
        ("time_in_queue_seconds", 1, 0.5),
        ("time_to_first_token_seconds", 1, 2.0),
        ("inter_token_latency_seconds", 2, 0.5),
        ("time_per_output_token_seconds", 1, 0.25),
        ("request_latency_seconds", 1, 3.0),
        ("step_tokens", 3, 15),
        ("step_sequences", 3, 3),
    ):
        assert engine.value(f"pagedcore_{name}_count") == count
        assert engine.value(f"pagedcore_{name}_sum") == total
    assert engine.value("pagedcore_inter_token_latency_seconds_bucket", le="0.2") == 0
    assert engine.value("pagedcore_inter_token_latency_seconds_bucket", le="0.5") == 2
    assert engine.value("pagedcore_prompt_tokens_total", tenant="") == 13
    assert engine.value("pagedcore_generation_tokens_total", tenant="") == 3
    assert engine.recorder.stats().sampled_tokens == 2


def test_step_time_is_from_its_start_and_a_gap_is_what_lies_before() -> None:
    engine = Engine()
    for submitted_s, now_s in ((1000.0, 1000.25), (1000.5, 1001.0), (1000.75, 1001.5)):  # the third was submitted while the second ran
        engine.clock.now_s = now_s
        engine.step(step_id=1, submitted_s=submitted_s, num_tokens=1, num_sequences=1)
    assert engine.value("pagedcore_step_seconds_count") == 3
    assert engine.value("pagedcore_step_seconds_sum") == 0.25 + 0.5 + 0.5
    assert engine.value("pagedcore_step_gap_seconds_count") == 2
    assert engine.value("pagedcore_step_gap_seconds_sum") == 0.25 + 0.0


def test_a_pause_without_requests_is_no_step_gap() -> None:
    engine = Engine()
    engine.step(step_id=1, submitted_s=999.5, num_running=0)
    engine.clock.now_s = 2000.0
    engine.step(step_id=2, submitted_s=1999.5)
    assert engine.value("pagedcore_step_gap_seconds_count") == 0


def test_a_step_that_does_not_say_when_it_was_submitted_has_no_duration() -> None:
    engine = Engine()
    engine.step(step_id=1, num_tokens=3, num_sequences=1)
    assert engine.value("pagedcore_step_tokens_count") == 1
    assert engine.value("pagedcore_step_seconds_count") == 0


def test_the_penalty_is_the_share_of_steps_spent_on_blocks_computed_before() -> None:
    engine = Engine()
    engine.step(BlockEvicted(block_hash("b"), 999.0, 0, 1.0, 1.0))
    request = make_add("r1", num_tokens=13)  # blocks: a cold (0..3), b evicted (4..7), c in flight (8..11), tail
    engine.step(Arrived(request, 1000.0), Admitted("r1", 1000.0, make_lookup("a", "b", "c?")))
    engine.clock.now_s = 1002.0
    first = engine.step(PrefillChunk("r1", 1000.0, 6, 1), step_id=1, submitted_s=1000.0, num_tokens=8)  # tokens 0..5: two of b
    engine.clock.now_s = 1003.0
    second = engine.step(PrefillChunk("r1", 1002.0, 7, 2), step_id=2, submitted_s=1002.0, num_tokens=10)  # 6..12: two of b, four of c
    assert first.avoidable_tokens == {"evicted": 2}
    assert second.avoidable_tokens == {"evicted": 2, "in_flight": 4}
    stats = engine.recorder.stats()
    assert stats.miss_penalty_tokens == {"evicted": 4, "in_flight": 4}
    assert stats.miss_penalty_seconds == {"evicted": pytest.approx(2.0 * 2 / 8 + 1.0 * 2 / 10), "in_flight": pytest.approx(1.0 * 4 / 10)}


def test_avoidable_tokens_planned_between_steps_belong_to_the_next_step() -> None:
    engine = Engine()
    request = make_add("r1", num_tokens=5)
    engine.step(Arrived(request, 1000.0), Admitted("r1", 1000.0, make_lookup("a?")), PrefillChunk("r1", 1000.0, 5, 1))
    batch = engine.step(step_id=1, submitted_s=999.0, num_tokens=5)
    assert batch.avoidable_tokens == {"in_flight": 4}
    assert engine.recorder.stats().miss_penalty_seconds["in_flight"] == pytest.approx(4 / 5)


def test_a_failed_step_makes_no_later_step_cost_more_than_it_took() -> None:
    engine = Engine()
    request = make_add("r1", num_tokens=9)
    engine.step(Arrived(request, 1000.0), Admitted("r1", 1000.0, make_lookup("a?", "b?")), PrefillChunk("r1", 1000.0, 9, 1))
    engine.step(make_finished(request, 1001.0, "error", num_computed_prompt_tokens=9))
    engine.clock.now_s = 1002.0
    assert engine.step(step_id=2, submitted_s=1001.0, num_tokens=1).avoidable_tokens == {}
    stats = engine.recorder.stats()
    assert (stats.miss_penalty_tokens["in_flight"], stats.miss_penalty_seconds["in_flight"]) == (8, 0.0)


def test_avoidable_tokens_of_a_step_in_flight_are_not_of_the_step_whose_commit_tells_of_them() -> None:
    engine = Engine()
    engine.step(Arrived(make_add("r1", num_tokens=9), 1000.0), Admitted("r1", 1000.0, make_lookup("a?", "b?")))
    engine.clock.now_s = 1001.0
    first = engine.step(
        PrefillChunk("r1", 1000.0, 4, step_id=1), PrefillChunk("r1", 1000.5, 5, step_id=2), step_id=1, submitted_s=1000.0, num_tokens=8
    )
    engine.clock.now_s = 1011.0
    second = engine.step(step_id=2, submitted_s=1001.0, num_tokens=5)
    assert (first.avoidable_tokens, second.avoidable_tokens) == ({"in_flight": 4}, {"in_flight": 4})
    assert engine.recorder.stats().miss_penalty_seconds["in_flight"] == pytest.approx(1.0 * 4 / 8 + 10.0 * 4 / 5)


def test_work_repeated_after_a_preemption_is_recomputed_and_no_penalty() -> None:
    engine = Engine()
    request = make_add("r1", num_tokens=13)
    engine.step(Arrived(request, 1000.0), Admitted("r1", 1000.0, make_lookup("a?", "b?", "c?")))
    engine.step(PrefillChunk("r1", 1000.0, 6, 1), step_id=1, num_tokens=6)
    engine.step(Preempted("r1", 1001.0, 6, 1.0, 0.5), Resumed("r1", 1002.0, 6), PrefillChunk("r1", 1002.0, 13, 2), step_id=2, num_tokens=13)
    stats = engine.recorder.stats()
    assert stats.num_preemptions == 1
    assert stats.recomputed_tokens == 6
    assert stats.miss_penalty_tokens == {"evicted": 0, "in_flight": 12}


def test_only_the_repeated_part_after_a_preemption_is_left_out_of_the_penalty() -> None:
    engine = Engine()
    request = make_add("r1", num_tokens=13)
    engine.step(Arrived(request, 1000.0), Admitted("r1", 1000.0, make_lookup("a?", "b?", "c?")))
    engine.step(PrefillChunk("r1", 1000.0, 6, 1), step_id=1, num_tokens=6)
    engine.step(Preempted("r1", 1001.0, 6, 1.0, 0.5), Resumed("r1", 1002.0, 6))
    avoidable = [engine.step(PrefillChunk("r1", 1002.0, n, 2), step_id=2, num_tokens=n).avoidable_tokens for n in (4, 4, 5)]
    assert avoidable == [{}, {"in_flight": 2}, {"in_flight": 4}]


def test_an_eviction_fills_the_block_histograms() -> None:
    engine = Engine()
    engine.step(
        BlockEvicted(block_hash("a"), 1000.0, 3, 20.0, 0.5), BlockEvicted(block_hash("b"), 1000.0, 0, 2.0, 2.0), reuse_gaps_s=[4.0, 4.0]
    )
    for name, count, total in (("reuses", 2, 3), ("lifetime_seconds", 2, 22), ("idle_seconds", 2, 2.5), ("reuse_gap_seconds", 2, 8)):
        assert engine.value(f"pagedcore_block_{name}_count") == count
        assert engine.value(f"pagedcore_block_{name}_sum") == total
    assert engine.value("pagedcore_block_reuses_bucket", le="0.0") == 1
    assert engine.value("pagedcore_pool_evictions_total") == 2


def test_gauges_are_those_after_the_last_step() -> None:
    engine = Engine(device_memory_bytes={"weights": 100, "kv_cache": 50})
    engine.step(
        num_running=3,
        num_waiting=2,
        waiting_by_reason={"blocks": 2},
        num_active_blocks=16,
        num_cached_blocks=4,
        num_free_blocks=44,
        num_live_tokens=48,
    )
    value = engine.value
    assert [value("pagedcore_open_requests", state=s) for s in ("running", "waiting", "swapped")] == [3, 2, 0]
    assert value("pagedcore_waiting_requests", reason="blocks") == 2
    assert [value("pagedcore_blocks", state=s) for s in ("active", "cached", "free")] == [16, 4, 44]
    assert value("pagedcore_kv_cache_usage_ratio") == 16 / 64
    assert value("pagedcore_kv_utilization_ratio") == 48 / 64
    assert [value("pagedcore_device_memory_bytes", kind=k) for k in ("weights", "kv_cache", "graphs", "total")] == [100, 50, 0, 150]
    engine.step(num_running=1, num_active_blocks=0, num_free_blocks=64)
    assert value("pagedcore_waiting_requests", reason="blocks") == 0
    assert value("pagedcore_kv_utilization_ratio") == 0


def test_the_one_minute_window_moves_while_the_engine_is_idle() -> None:
    engine = Engine()

    def rate(window: str) -> float:
        return engine.value("pagedcore_cache_level_hit_rate", level="prefix", window=window)

    engine.serve("r1", COLD)
    engine.clock.now_s = 1030.0
    engine.serve("r2", make_lookup(pool=3))
    assert rate("1m") == 12 / 26
    engine.clock.now_s = 1059.9
    assert rate("1m") == 12 / 26
    engine.clock.now_s = 1060.0
    assert rate("1m") == 12 / 13
    engine.clock.now_s = 1090.0
    assert math.isnan(rate("1m"))
    assert rate("total") == 12 / 26


def test_a_lookup_between_steps_belongs_to_the_moment_it_was_recorded_at() -> None:
    engine = Engine()
    engine.step(step_id=1)
    engine.clock.now_s = 1500.0
    request = make_add("r1", num_tokens=13, arrival_s=1500.0)
    batch = StepEvents(now_s=1000.0, events=[Arrived(request, 1500.0), Admitted("r1", 1500.0, COLD)], num_running=1)
    engine.recorder.record(batch)  # not a step: it still has the time of the last one
    engine.clock.now_s = 1501.0
    engine.step(step_id=2)
    assert engine.value("pagedcore_cache_level_hit_rate", level="page", window="1m") == 0.0


def test_a_window_after_a_long_pause_holds_only_what_came_after_it() -> None:
    engine = Engine()
    engine.serve("r1", COLD)
    engine.recorder.flush()
    engine.clock.now_s = 5000.5
    engine.serve("r2", make_lookup(live=3))
    assert engine.value("pagedcore_cache_level_hit_rate", level="page", window="1m") == 1.0
