"""The last minute of an engine, each number worked out by hand."""

from __future__ import annotations

import pytest

from pagedcore.console.pace import Pace
from pagedcore.core.events import Arrived, Event, FirstToken, StepEvents
from pagedcore.messages import AddRequest
from support.observed import FakeClock, make_add, make_finished


def make_pace(*, age_s: float = 600.0) -> tuple[Pace, FakeClock]:
    """A pace that began `age_s` ago."""
    clock = FakeClock(1000.0)
    pace = Pace(clock)
    clock.now_s += age_s
    return pace, clock


def record(pace: Pace, now_s: float, *events: Event, submitted_s: float | None = None, **facts: int) -> None:
    step_id = None if submitted_s is None else 1
    pace.record(StepEvents(now_s=now_s, events=list(events), step_id=step_id, submitted_s=submitted_s, **facts))


def add(name: str, arrival_s: float, **fields: object) -> AddRequest:
    return make_add(name, num_tokens=4, arrival_s=arrival_s, **fields)  # type: ignore[arg-type]


def test_steps_count_from_their_submission_or_from_the_end_of_the_step_before() -> None:
    pace, clock = make_pace()
    record(pace, 1590.0, submitted_s=1589.0, num_generated_tokens=3, num_prefill_tokens=30)
    record(pace, 1592.0, submitted_s=1589.5, num_generated_tokens=3)  # it waited for the first one: two seconds of its own
    clock.now_s = 1592.0
    minute = pace.last_minute()
    assert minute["step_busy_ratio"] == pytest.approx(3.0 / 60)
    assert minute["generated_tokens_per_s"] == pytest.approx(0.1)
    assert minute["prefill_tokens_per_s"] == pytest.approx(0.5)


def test_a_young_engine_is_measured_over_its_age() -> None:
    pace, clock = make_pace(age_s=4.0)
    record(pace, 1004.0, submitted_s=1002.0, num_generated_tokens=8)
    clock.now_s = 1004.0
    minute = pace.last_minute()
    assert (minute["seconds"], minute["step_busy_ratio"], minute["generated_tokens_per_s"]) == (4.0, 0.5, 2.0)


def test_what_is_older_than_a_minute_is_forgotten_also_when_nothing_happens() -> None:
    pace, clock = make_pace()
    record(pace, 1600.5, submitted_s=1600.0, num_generated_tokens=6)
    clock.now_s = 1659.9
    assert pace.last_minute()["generated_tokens_per_s"] == pytest.approx(0.1)
    clock.now_s = 1660.0
    assert pace.last_minute()["generated_tokens_per_s"] == 0.0


def test_the_time_to_first_token_is_that_of_the_first_choice_and_ends_count_once_a_request() -> None:
    pace, clock = make_pace()
    first, second = add("a", 1600.0, num_choices=2), add("a#1", 1600.0, group="a", choice_index=1, num_choices=2)
    record(pace, 1600.1, Arrived(first, 1600.1), Arrived(second, 1600.1))
    record(pace, 1600.5, FirstToken("a", 1600.5))
    record(pace, 1600.9, FirstToken("a#1", 1600.9), make_finished(first, 1600.9), make_finished(second, 1600.9))
    clock.now_s = 1601.0
    minute = pace.last_minute()
    assert (minute["num_first_tokens"], minute["num_ended"]) == (1, 1)
    assert minute["ttft_p50_s"] == minute["ttft_p99_s"] == pytest.approx(0.5)


def test_a_refused_duplicate_leaves_the_first_requests_clock_alone() -> None:
    pace, clock = make_pace()
    first, duplicate = add("a", 1600.0), add("a", 1600.2)
    record(pace, 1600.0, Arrived(first, 1600.0))
    record(pace, 1600.2, Arrived(duplicate, 1600.2), make_finished(duplicate, 1600.2, status="rejected"))
    record(pace, 1601.0, FirstToken("a", 1601.0))
    clock.now_s = 1601.0
    assert pace.last_minute()["ttft_p50_s"] == pytest.approx(1.0)


def test_an_end_outside_a_step_counts_when_it_was_and_not_at_the_last_step() -> None:
    pace, clock = make_pace()
    record(pace, 1600.0, submitted_s=1599.0)
    refused = add("a", 1700.0)
    record(pace, 1600.0, Arrived(refused, 1700.0), make_finished(refused, 1700.0, "rejected", reject_reason="too_long"))
    clock.now_s = 1701.0
    assert pace.last_minute()["num_ended"] == 1


def test_without_first_tokens_there_is_no_percentile() -> None:
    pace, _ = make_pace()
    assert pace.last_minute()["ttft_p99_s"] is None


def test_nothing_of_ended_requests_is_kept() -> None:
    pace, _ = make_pace()
    request = add("a", 1600.0)
    record(pace, 1600.0, Arrived(request, 1600.0), make_finished(request, 1600.0, status="aborted"))
    assert pace._unanswered == {}


def test_the_longest_wait_for_a_token_is_told_with_what_its_step_computed() -> None:
    pace, clock = make_pace()
    for now_s, gaps_s, num_tokens, num_prefill_tokens in [(1600.1, [0.1, 0.3], 2, 0), (1600.2, [0.1], 1, 0), (1603.2, [3.0, 0.2], 40, 38)]:
        pace.record(StepEvents(now_s=now_s, inter_token_gaps_s=gaps_s, num_tokens=num_tokens, num_prefill_tokens=num_prefill_tokens))
    clock.now_s = 1604.0
    minute = pace.last_minute()
    assert (minute["token_gap_p50_s"], minute["token_gap_max_s"]) == (0.3, 3.0)
    assert (minute["token_gap_max_step_tokens"], minute["token_gap_max_step_prefill_tokens"]) == (40, 38)
    clock.now_s = 1664.0
    assert pace.last_minute()["token_gap_max_s"] is None
