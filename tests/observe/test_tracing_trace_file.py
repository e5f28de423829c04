"""The trace file: valid to the letter, and what it shows is what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedcore.core.events import Arrived
from pagedcore.errors import ConfigError
from support.observed import make_add, make_finished
from support.trace_format import check_trace
from support.traced import TracedEngine, live_through_a_preemption, preempted_request


def events_of(trace: dict[str, Any], kind: str, **facts: Any) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind and all(event[key] == value for key, value in facts.items())]


def one_request() -> dict[str, Any]:
    engine = TracedEngine()
    live_through_a_preemption(engine, preempted_request())
    return engine.tracer.chrome_trace()


def test_the_track_of_a_request_shows_its_phases_in_microseconds() -> None:
    trace = one_request()
    check_trace(trace)
    (name,) = events_of(trace, "M", name="thread_name", pid=2)
    assert (name["tid"], name["args"]) == (1, {"name": "r"})
    slices = [(event["name"], event["ts"], round(event["dur"])) for event in events_of(trace, "X", pid=2, tid=1)]
    assert slices == [
        ("r", 1000_000_000.0, 2_600_000),
        ("queue", 1000_000_000.0, 1_400_000),
        ("prefill", 1001_400_000.0, 100_000),
        ("decode", 1001_500_000.0, 100_000),
        ("preempted", 1001_600_000.0, 400_000),
        ("decode", 1002_000_000.0, 600_000),
    ]
    points = [(event["name"], event["ts"]) for event in events_of(trace, "i", pid=2, tid=1)]
    assert points == [
        ("passed_over", 1000_900_000.0),
        ("prefill_chunk", 1001_400_000.0),
        ("first_token", 1001_500_000.0),
        ("preempted", 1001_600_000.0),
        ("resumed", 1002_000_000.0),
        ("prefill_chunk", 1002_000_000.0),
    ]
    (preempted,) = events_of(trace, "i", name="preempted")
    assert preempted["args"] == {"num_lost_tokens": 13, "usage_before": 0.9, "usage_after": 0.5}
    assert events_of(trace, "X", name="r")[0]["args"]["waiting_reason_ms"]["blocks"] == 900.0


def test_steps_have_a_track_with_sizes_and_gaps_and_counters_beside_it() -> None:
    engine = TracedEngine()
    pool = {"num_active_blocks": 3, "num_cached_blocks": 2, "num_free_blocks": 59}
    engine.at(1001.0, step_id=0, submitted_s=1000.5, num_tokens=40, num_prefill_tokens=39, num_sequences=2, num_waiting=1, **pool)
    engine.at(1001.5, step_id=1, submitted_s=1001.25, num_tokens=2, num_sequences=2, num_waiting=1, **pool)
    trace = engine.tracer.chrome_trace()
    check_trace(trace)
    first, second = events_of(trace, "X", pid=1)
    assert (first["name"], first["ts"], first["dur"]) == ("prefill step", 1000_500_000.0, 500_000.0)
    assert first["args"] == {"step_id": 0, "num_tokens": 40, "num_prefill_tokens": 39, "num_sequences": 2, "gap_us": None}
    assert (second["name"], second["args"]["gap_us"]) == ("decode step", 250_000.0)
    assert [(event["name"], event["args"]) for event in events_of(trace, "C")] == [
        ("blocks", {"active": 3, "cached": 2, "free": 59}),
        ("batch size", {"sequences": 2}),
        ("requests", {"running": 1, "waiting": 1}),
    ]  # the second step changed none of them


def test_what_still_runs_ends_now_and_a_refused_request_is_a_point_in_time() -> None:
    engine = TracedEngine()
    refused = make_add("big")
    engine.at(1000.0, Arrived(make_add("r"), 1000.0))
    engine.at(1000.0, Arrived(refused, 1000.0), make_finished(refused, 1000.0, "rejected", reject_reason="too_long"))
    engine.clock.now_s = 1003.0
    trace = engine.tracer.chrome_trace()
    check_trace(trace)
    slices = {(event["name"], event["dur"]) for event in events_of(trace, "X", pid=2)}
    assert slices == {("r", 3_000_000.0), ("queue", 3_000_000.0), ("big", 0.0)}


def test_an_engine_that_did_nothing_has_a_valid_file(tmp_path: Path) -> None:
    engine = TracedEngine()
    engine.tracer.write(tmp_path / "trace.json")
    check_trace(json.loads((tmp_path / "trace.json").read_text()))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no/trace\.json': No such file or directory; choose another file"):
        TracedEngine().tracer.write(tmp_path / "no" / "trace.json")


@pytest.mark.parametrize(
    "fault",
    [
        {"ph": "X", "name": "late", "pid": 2, "tid": 1, "ts": 1002_000_000.0, "dur": 9e9, "args": {}},
        {"ph": "X", "name": "lost", "pid": 2, "tid": 77, "ts": 0.0, "dur": 1.0, "args": {}},
        {"ph": "i", "s": "x", "name": "odd", "pid": 2, "tid": 1, "ts": 0.0, "args": {}},
        {"ph": "C", "name": "blocks", "pid": 1, "tid": 0, "ts": 0.0, "args": {"active": "3"}},
        {"ph": "M", "name": "thread_name", "pid": 2, "tid": 1, "args": {"name": "again"}},
    ],
)
def test_the_reader_of_these_tests_is_strict(fault: dict[str, Any]) -> None:
    trace = one_request()
    trace["traceEvents"].append(fault)
    with pytest.raises(AssertionError):
        check_trace(trace)
