"""Each request's cache report: completed while it runs, final after it ended, kept for a while."""

from __future__ import annotations

from pagedcore.core.events import Admitted, Arrived, BlockEvicted
from pagedcore.observe.explain import NUM_FINISHED_KEPT
from pagedcore.outputs import CacheReport
from support.observed import Engine, block_hash, make_add, make_finished, make_lookup

PROVISIONAL = CacheReport(num_prompt_tokens=13, num_eligible_blocks=3, num_resident_blocks=1, pool_tokens=4, computed_tokens=9)


def test_the_cores_report_gets_its_reasons() -> None:
    engine = Engine()
    engine.step(BlockEvicted(block_hash("b"), 990.0, 0, 1.0, 1.0))
    engine.step(Arrived(make_add("r1", num_tokens=13), 1000.0), Admitted("r1", 1000.0, make_lookup("b", "c", pool=1)))
    report = engine.recorder.complete(PROVISIONAL, "r1")
    assert report == CacheReport(
        num_prompt_tokens=13,
        num_eligible_blocks=3,
        num_resident_blocks=1,
        pool_tokens=4,
        computed_tokens=9,
        miss_blocks={"evicted": 1, "cold": 1},
        evicted_age_s=10.0,
    )
    assert engine.recorder.cache_report("r1") == report


def test_within_one_batch_a_lookup_knows_the_evictions_before_it_and_none_after_it() -> None:
    engine = Engine()
    before, after = BlockEvicted(block_hash("a"), 1000.0, 0, 1.0, 1.0), BlockEvicted(block_hash("b"), 1000.0, 0, 1.0, 1.0)
    arrived, admitted = Arrived(make_add("r1"), 1000.0), Admitted("r1", 1000.0, make_lookup("a", "b"))
    engine.step(arrived, before, admitted, after)
    report = engine.recorder.cache_report("r1")
    assert report is not None
    assert report.miss_blocks == {"evicted": 1, "cold": 1}
    assert engine.recorder.stats().pool_evictions == 2


def test_a_divergence_is_reported_at_its_token() -> None:
    engine = Engine()
    engine.step(Arrived(make_add("r1"), 1000.0), Admitted("r1", 1000.0, make_lookup("b", pool=1, sibling=2)))
    assert engine.recorder.complete(PROVISIONAL, "r1").diverged_at_token == 6


def test_the_report_of_an_ended_request_is_the_exact_partition() -> None:
    engine = Engine()
    engine.serve("r1", make_lookup("b", "c", live=1), abandoned=3)
    report = engine.recorder.cache_report("r1")
    assert report is not None
    assert (report.live_tokens, report.computed_tokens, report.abandoned_tokens) == (4, 6, 3)
    assert report.live_tokens + report.computed_tokens + report.abandoned_tokens == report.num_prompt_tokens


def test_unknown_requests_and_further_choices_keep_the_cores_report() -> None:
    engine = Engine()
    engine.step(Arrived(make_add("g#1", group="g", choice_index=1, num_choices=2), 1000.0), Admitted("g#1", 1000.0, None))
    for request_id in ("g#1", "unknown"):
        assert engine.recorder.complete(PROVISIONAL, request_id) is PROVISIONAL
        assert engine.recorder.cache_report(request_id) is None


def test_a_request_that_was_never_admitted_does_not_get_the_misses_of_an_earlier_one_of_its_id() -> None:
    engine = Engine()
    engine.serve("retried", make_lookup("a", "b"))
    left_in_the_queue = CacheReport(num_prompt_tokens=9, abandoned_tokens=9)
    assert engine.recorder.complete(left_in_the_queue, "retried") is left_in_the_queue


def test_the_last_ended_requests_are_kept_and_running_ones_always() -> None:
    engine = Engine()
    running = make_add("running")
    engine.step(Arrived(running, 1000.0), Admitted("running", 1000.0, make_lookup("a")))
    for i in range(NUM_FINISHED_KEPT + 1):
        engine.serve(f"r{i}", make_lookup("a"))
    assert engine.recorder.cache_report("r0") is None
    assert engine.recorder.cache_report("r1") is not None
    assert engine.recorder.cache_report("running") is not None
    engine.step(make_finished(running, 1000.0))
    assert engine.recorder.cache_report("running") is not None
    assert engine.recorder.cache_report("r1") is None
