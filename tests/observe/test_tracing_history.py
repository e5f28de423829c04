"""What is remembered of each request, by hand-computed numbers."""

from __future__ import annotations

from typing import Any

import pytest

from pagedcore.core.events import Admitted, Arrived, FirstToken, PrefillChunk
from pagedcore.tracing.history import MAX_ENDED
from pagedcore.tracing.life import MAX_EVENTS
from pagedcore.tracing.steps import MAX_STEPS
from support.observed import make_add, make_finished, make_lookup
from support.traced import TRACE_ID, TRACEPARENT, TracedEngine, live_through_a_preemption, preempted_request


def found(engine: TracedEngine, request_id: str) -> dict[str, Any]:
    record = engine.history.find(request_id)
    assert record is not None
    return record


def test_a_request_that_was_preempted_is_told_to_the_millisecond() -> None:
    engine = TracedEngine()
    live_through_a_preemption(engine, preempted_request(traceparent=TRACEPARENT))
    assert found(engine, "r") == {
        "request_id": "r",
        "group_id": "r",
        "tenant": "acme",
        "class": "chat",
        "user": None,
        "adapter": "library",
        "routing": None,
        "status": "completed",
        "finish_reason": "stop",
        "reject_reason": None,
        "prompt_tokens": 13,
        "completion_tokens": 5,
        "cached_tokens": {"live": 4, "pool": 0, "host": 0},
        "miss": {"cold": 2},
        "first_divergence": None,
        "nearest_cached_prefix": 4,
        "time_in_queue_ms": 1400.0,
        "waiting_reason_ms": {"next_step": 200.0, "max_num_seqs": 300.0, "token_budget": 400.0, "blocks": 900.0},
        "ttft_ms": 1500.0,
        "decode_latency_ms_per_token": 250.0,
        "e2e_ms": 2600.0,
        "kv_cache_pages_allocated": 5,
        "kv_cache_pages_new": 4,
        "preemptions": 1,
        "trace_id": TRACE_ID,
        "events": [
            {"name": "arrived", "t_ms": 0.0},
            {"name": "queued", "t_ms": 100.0},
            {"name": "passed_over", "t_ms": 900.0},
            {"name": "admitted", "t_ms": 1400.0},
            {"name": "prefill_chunk", "t_ms": 1400.0, "num_tokens": 9},
            {"name": "first_token", "t_ms": 1500.0},
            {"name": "preempted", "t_ms": 1600.0, "num_lost_tokens": 13, "usage_before": 0.9, "usage_after": 0.5},
            {"name": "resumed", "t_ms": 2000.0, "num_recomputed_tokens": 8},
            {"name": "prefill_chunk", "t_ms": 2000.0, "num_tokens": 8},
            {"name": "finished", "t_ms": 2600.0, "status": "completed", "finish_reason": "stop"},
        ],
        "num_events_left_out": 0,
    }


def test_phases_fill_a_life_from_arrival_to_end() -> None:
    engine = TracedEngine()
    live_through_a_preemption(engine, preempted_request())
    (life,) = engine.history.lives()
    assert life.phases(0.0) == [
        ("queue", 1000.0, 1001.4),
        ("prefill", 1001.4, 1001.5),
        ("decode", 1001.5, 1001.6),
        ("preempted", 1001.6, 1002.0),
        ("decode", 1002.0, 1002.6),
    ]


def test_a_running_request_is_told_as_it_stands() -> None:
    engine = TracedEngine()
    live_through_a_preemption(engine, preempted_request(), until_s=1000.5)
    engine.clock.now_s = 1000.7
    waiting = found(engine, "r")
    assert (waiting["status"], waiting["time_in_queue_ms"], waiting["e2e_ms"]) == ("waiting", None, None)
    assert waiting["waiting_reason_ms"] == {"next_step": 200.0, "max_num_seqs": 300.0, "token_budget": 200.0}
    assert waiting["cached_tokens"] == waiting["miss"] == {}
    engine = TracedEngine()
    live_through_a_preemption(engine, preempted_request(), until_s=1001.5)
    running = found(engine, "r")
    assert (running["status"], running["ttft_ms"], running["e2e_ms"]) == ("running", 1500.0, None)
    assert running["cached_tokens"] == {"live": 4, "pool": 0, "host": 0}
    assert running["events"][-1]["name"] == "first_token"


def test_what_is_handed_out_does_not_change_when_the_request_goes_on() -> None:
    engine = TracedEngine()
    live_through_a_preemption(engine, preempted_request(), until_s=1001.5)
    (before,) = engine.history.lives()
    engine.at(1001.7, PrefillChunk("r", 1001.7, 1))
    assert before.events[-1].name == "first_token"


def test_a_request_in_a_lower_class_waits_for_priority() -> None:
    engine = TracedEngine()
    low, high = make_add("low", priority=5), make_add("high", priority=0)
    engine.at(1000.0, Arrived(low, 1000.0), Arrived(high, 1000.0), planned_s=1000.0, stop_key=(0, "blocks"))
    engine.at(1000.3, planned_s=1000.3, stop_key=(5, "blocks"))
    engine.at(1000.7, make_finished(low, 1000.7, "aborted"), make_finished(high, 1000.7, "aborted"))
    assert found(engine, "low")["waiting_reason_ms"] == {"priority": 300.0, "blocks": 400.0}
    assert found(engine, "high")["waiting_reason_ms"] == {"blocks": 700.0}


def test_a_second_arrival_under_an_id_in_use_is_rejected_and_the_first_goes_on() -> None:
    engine = TracedEngine()
    first, second = make_add("r", num_tokens=9), make_add("r", num_tokens=5)
    engine.at(1000.0, Arrived(first, 1000.0))
    engine.at(1001.0, Arrived(second, 1001.0), make_finished(second, 1001.0, "rejected", reject_reason="invalid"))
    assert found(engine, "r")["status"] == "waiting"
    engine.at(1002.0, make_finished(first, 1002.0, num_output_tokens=3))
    assert [(life.status, life.num_prompt_tokens) for life in engine.history.lives()] == [("rejected", 5), ("completed", 9)]


def test_a_rejected_request_has_its_reason_and_did_nothing() -> None:
    engine = TracedEngine()
    request = make_add("big", num_tokens=9)
    engine.at(1000.2, Arrived(request, 1000.2), make_finished(request, 1000.2, "rejected", reject_reason="too_long"))
    record = found(engine, "big")
    assert (record["status"], record["reject_reason"], record["e2e_ms"]) == ("rejected", "too_long", 200.0)
    assert [event["name"] for event in record["events"]] == ["arrived", "queued", "finished"]
    assert engine.history.lives()[0].phases(1001.0) == []


def test_choices_beyond_the_first_have_no_lookup_of_their_own() -> None:
    engine = TracedEngine()
    for index, name in enumerate(("g", "g#1")):
        request = make_add(name, group="g", choice_index=index, num_choices=2)
        engine.at(1000.0, Arrived(request, 1000.0), Admitted(name, 1000.0, make_lookup("a", live=1) if index == 0 else None))
        engine.at(1001.0, make_finished(request, 1001.0))
    assert found(engine, "g")["cached_tokens"]["live"] == 4
    assert (found(engine, "g#1")["cached_tokens"], found(engine, "g#1")["group_id"]) == ({}, "g")


def test_recent_shows_running_requests_first_and_searches_in_any_case() -> None:
    engine = TracedEngine()
    for number, tenant in enumerate(("Acme", "beta", None)):
        request = make_add(f"r{number}", arrival_s=1000.0 + number, tenant=tenant, traceparent=TRACEPARENT if number == 1 else None)
        engine.at(1000.0 + number, Arrived(request, 1000.0 + number))
        if number == 0:
            engine.at(1000.5, make_finished(request, 1000.5, "aborted"))

    def names(*arguments: Any) -> list[str]:
        return [record["request_id"] for record in engine.history.recent(*arguments)]

    assert names() == ["r2", "r1", "r0"]
    assert names(2) == ["r2", "r1"]
    assert names(100, "ACME") == ["r0"]
    assert names(100, "abort") == ["r0"]
    assert names(100, TRACE_ID[:8]) == ["r1"]
    assert names(100, "waiting") == ["r2", "r1"]
    assert names(100, "nobody") == []


def test_memory_is_bounded() -> None:
    engine = TracedEngine()
    long_prompt = make_add("long", num_tokens=5000)
    engine.at(1000.0, Arrived(long_prompt, 1000.0))
    engine.at(1000.0, *(PrefillChunk("long", 1000.0, 1) for _ in range(300)), FirstToken("long", 1000.0))
    engine.at(1001.0, make_finished(long_prompt, 1001.0))
    record = found(engine, "long")
    assert (len(record["events"]), record["num_events_left_out"]) == (MAX_EVENTS + 1, 300 + 1 + 2 - MAX_EVENTS)
    assert record["events"][-1]["name"] == "finished"
    assert not hasattr(engine.history.lives()[0].request, "prompt_token_ids")
    for number in range(MAX_ENDED + 10):
        request = make_add(f"r{number}")
        engine.at(1002.0, Arrived(request, 1002.0), make_finished(request, 1002.0))
    assert len(engine.history.lives()) == MAX_ENDED
    assert engine.history.find("r9") is None
    assert engine.history.find("r10") is not None
    for number in range(MAX_STEPS + 5):
        engine.at(1003.0, step_id=number)
    steps = engine.history.steps()
    assert (len(steps), steps[0].step_id) == (MAX_STEPS, 5)


def test_events_of_a_request_whose_arrival_was_not_recorded_are_left_out() -> None:
    engine = TracedEngine()
    unknown = make_add("u")
    engine.at(1000.0, Admitted("u", 1000.0, None), PrefillChunk("u", 1000.0, 1), make_finished(unknown, 1000.0))
    assert engine.history.find("u") is None


@pytest.mark.parametrize(("submitted_s", "began_s", "gap_s"), [(1001.5, 1001.5, 0.5), (1000.5, 1001.0, 0.0)])
def test_a_step_begins_when_the_one_before_is_done(submitted_s: float, began_s: float, gap_s: float) -> None:
    engine = TracedEngine()
    engine.at(1001.0, step_id=1, submitted_s=1000.0)
    engine.at(1002.0, step_id=2, submitted_s=submitted_s, num_tokens=7, num_sequences=3)
    first, second = engine.history.steps()
    assert (first.began_s, first.ended_s, first.gap_s) == (1000.0, 1001.0, None)
    assert (second.began_s, second.ended_s, second.gap_s) == (began_s, 1002.0, gap_s)
    assert (second.num_tokens, second.num_sequences) == (7, 3)


def test_an_idle_time_is_no_gap() -> None:
    engine = TracedEngine()
    engine.at(1001.0, step_id=1, submitted_s=1000.0, num_running=0)
    engine.at(1009.0, step_id=2, submitted_s=1008.0)
    assert engine.history.steps()[1].gap_s is None


def test_requests_that_end_before_any_plan_leave_nothing_behind() -> None:
    engine = TracedEngine()
    for number in range(3):
        request = make_add(f"r{number}")
        engine.at(1000.0, Arrived(request, 1000.0), make_finished(request, 1000.0, "aborted"))
    assert not engine.history._waits._unseen


def test_a_request_that_was_never_looked_up_is_not_told_as_an_earlier_one_of_its_id() -> None:
    """As a client's retry is that gives up in the queue, and a duplicate that is refused while the first one runs."""
    engine, first, retry, duplicate = TracedEngine(), *(make_add("r", num_tokens=13) for _ in range(3))
    engine.at(1000.0, Arrived(first, 1000.0), Admitted("r", 1000.0, make_lookup("a", "b", live=1)))
    engine.at(1000.5, Arrived(duplicate, 1000.5), make_finished(duplicate, 1000.5, "rejected", reject_reason="invalid"))
    engine.at(1001.0, make_finished(first, 1001.0))
    engine.at(1002.0, Arrived(retry, 1002.0))
    told = [found(engine, "r")]
    engine.at(1003.0, make_finished(retry, 1003.0, "aborted"))
    told += [found(engine, "r"), *(record for record in engine.history.recent() if record["status"] == "rejected")]
    assert [record["status"] for record in told] == ["waiting", "aborted", "rejected"]
    nothing = {"cached_tokens": {}, "miss": {}, "first_divergence": None, "nearest_cached_prefix": None}
    assert [{name: record[name] for name in nothing} for record in told] == [nothing] * 3
