"""What a caller sent is one request with one prompt, however many choices it unfolded into; output tokens are those of every choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedcore.core.events import Admitted, Arrived, FirstToken
from pagedcore.messages import AddRequest
from pagedcore.observe.requests import MAX_HALF_ENDED_GROUPS
from support.observed import Engine, make_add, make_finished, make_lookup


def choices(num: int, name: str = "g") -> list[AddRequest]:
    return [
        make_add(name if i == 0 else f"{name}#{i}", num_tokens=5, group=name, choice_index=i, num_choices=num, adapter="litserve")
        for i in range(num)
    ]


def ended(engine: Engine, status: str) -> float:
    """Requests that ended so; completed ones by a stop."""
    reason = "stop" if status == "completed" else ""
    return ended_by(engine, status, reason)


def ended_by(engine: Engine, status: str, finish_reason: str) -> float:
    labels = {"status": status, "finish_reason": finish_reason, "adapter": "litserve", "tenant": "", "class": ""}
    return engine.value("pagedcore_requests_total", **labels)


def test_two_choices_are_one_request_one_lookup_and_one_first_token() -> None:
    engine = Engine()
    first, second = choices(2)
    engine.step(Arrived(first, 1000.0), Arrived(second, 1000.0))
    engine.step(Admitted("g", 1001.0, make_lookup("a")), Admitted("g#1", 1004.0, None))
    engine.step(FirstToken("g", 1002.0), FirstToken("g#1", 1005.0))
    engine.step(make_finished(first, 1006.0, num_output_tokens=3, num_computed_prompt_tokens=5))
    assert ended(engine, "completed") == 0
    engine.step(make_finished(second, 1008.0, num_output_tokens=4, num_computed_prompt_tokens=1))
    assert ended(engine, "completed") == 1
    stats = engine.recorder.stats()
    assert stats.num_finished["completed"] == 1
    assert (stats.prompt_tokens, stats.generation_tokens) == (5, 7)
    assert (stats.prefix_cache_query_tokens, stats.computed_prompt_tokens) == (5, 5)
    for name, total in (("time_in_queue_seconds", 1.0), ("time_to_first_token_seconds", 2.0), ("request_latency_seconds", 8.0)):
        assert engine.value(f"pagedcore_{name}_count") == 1
        assert engine.value(f"pagedcore_{name}_sum") == total


@pytest.mark.parametrize(
    ("statuses", "worst"),
    [
        (["completed", "completed"], "completed"),
        (["aborted", "completed"], "aborted"),
        (["completed", "error"], "error"),
        (["error", "aborted"], "error"),
    ],
)
def test_a_group_has_the_worst_status_of_its_choices(statuses: list[str], worst: str) -> None:
    engine = Engine()
    both = choices(2)
    for request in both:
        engine.step(Arrived(request, 1000.0))
    for request, status in zip(both, statuses, strict=True):
        engine.step(make_finished(request, 1001.0, status))
    assert {s: n for s, n in engine.recorder.stats().num_finished.items() if n} == {worst: 1}


@pytest.mark.parametrize(
    ("endings", "status", "reason"),
    [
        ([("completed", "stop"), ("completed", "stop")], "completed", "stop"),
        ([("completed", "length"), ("completed", "stop")], "completed", "length"),
        ([("completed", "stop"), ("completed", "length")], "completed", "length"),
        ([("completed", "length"), ("aborted", "abort")], "aborted", ""),
    ],
)
def test_a_completed_request_is_counted_by_stop_or_length_and_length_wins(endings: list[tuple[str, str]], status: str, reason: str) -> None:
    engine = Engine()
    both = choices(2)
    for request in both:
        engine.step(Arrived(request, 1000.0))
    for request, (one_status, one_reason) in zip(both, endings, strict=True):
        engine.step(replace(make_finished(request, 1001.0, one_status), finish_reason=one_reason))
    assert ended_by(engine, status, reason) == 1
    counted = {key: value for key, value in engine.samples().items() if key.startswith("pagedcore_requests_total") and value}
    assert len(counted) == 1


def test_a_rejected_choice_rejects_its_group_at_once_and_once() -> None:
    engine = Engine()
    for request in choices(3):
        engine.step(Arrived(request, 1000.0), make_finished(request, 1000.0, "rejected", reject_reason="too_long"))
        assert ended(engine, "rejected") == 1
    assert engine.recorder.stats().num_rejected["too_long"] == 1
    assert engine.value("pagedcore_request_latency_seconds_count") == 0


def test_groups_whose_other_choices_never_come_are_forgotten() -> None:
    engine = Engine()
    for i in range(MAX_HALF_ENDED_GROUPS + 50):
        first = choices(2, f"g{i}")[0]
        engine.step(Arrived(first, 1000.0), make_finished(first, 1000.0, "rejected", reject_reason="queue_full"))
    assert len(engine.recorder._requests._groups) == MAX_HALF_ENDED_GROUPS
    assert engine.recorder._requests._open == {}


def test_a_request_id_can_be_used_again() -> None:
    engine = Engine()
    for _ in range(2):
        engine.serve("r1", make_lookup("a"), adapter="litserve")
    assert ended(engine, "completed") == 2


def test_a_request_that_arrived_before_recording_began_is_left_out() -> None:
    engine = Engine()
    engine.step(
        Admitted("r1", 1000.0, make_lookup("a")), FirstToken("r1", 1000.0), make_finished(make_add("r1"), 1000.0, num_output_tokens=5)
    )
    stats = engine.recorder.stats()
    assert stats.generation_tokens == stats.prefix_cache_query_tokens == sum(stats.num_finished.values()) == 0


def test_a_request_whose_id_is_in_use_is_rejected_and_the_open_one_goes_on() -> None:
    engine = Engine()
    first, again = make_add("r1", num_tokens=5, adapter="litserve"), make_add("r1", num_tokens=5, adapter="litserve")
    engine.step(Arrived(first, 1000.0), Admitted("r1", 1000.0, make_lookup("a")))
    engine.step(Arrived(again, 1001.0), make_finished(again, 1001.0, "rejected", reject_reason="invalid", num_abandoned_prompt_tokens=5))
    assert ended(engine, "rejected") == 1
    engine.step(make_finished(first, 1002.0, num_output_tokens=3, num_computed_prompt_tokens=5))
    assert ended(engine, "completed") == 1
    stats = engine.recorder.stats()
    assert (stats.generation_tokens, stats.computed_prompt_tokens, stats.abandoned_prompt_tokens) == (3, 5, 0)


def test_a_request_of_which_one_choice_has_an_id_in_use_is_rejected_once() -> None:
    engine = Engine()
    other, (first, second) = make_add("g#1", arrival_s=999.0, adapter="litserve"), choices(2)
    engine.step(Arrived(other, 999.0))
    engine.step(Arrived(first, 1000.0), Arrived(second, 1000.0), make_finished(second, 1000.0, "rejected", reject_reason="invalid"))
    assert ended(engine, "rejected") == 1
    engine.step(make_finished(first, 1001.0, "aborted"), make_finished(other, 1001.0))
    assert (ended(engine, "rejected"), ended(engine, "aborted"), ended(engine, "completed")) == (1, 0, 1)
    assert engine.recorder._requests._groups == {}


def test_two_requests_of_the_same_ids_are_two_of_which_one_is_rejected() -> None:
    engine = Engine()
    mine = choices(2)
    theirs = [replace(request, arrival_s=1000.5) for request in choices(2)]
    engine.step(*(Arrived(request, 1000.0) for request in mine))
    for request in theirs:
        engine.step(Arrived(request, 1000.5), make_finished(request, 1000.5, "rejected", reject_reason="invalid"))
    engine.step(*(make_finished(request, 1001.0) for request in mine))
    assert (ended(engine, "rejected"), ended(engine, "completed")) == (1, 1)


def test_a_request_whose_last_choice_never_came_is_counted_when_the_engine_is_closed() -> None:
    engine = Engine()
    first = choices(2)[0]
    engine.step(Arrived(first, 1000.0), make_finished(first, 1001.0, "aborted"))
    assert ended(engine, "aborted") == 0
    for _ in range(2):
        engine.recorder.close()
        assert ended(engine, "aborted") == 1
