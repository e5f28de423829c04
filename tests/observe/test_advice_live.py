"""The advisor beside a recorder: what it hears, what it keeps, and what it tells whom."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pagedcore.advice import advisor as advisor_module
from pagedcore.advice.advisor import Advisor
from pagedcore.advice.offline import advise
from pagedcore.advice.trace import read_trace
from pagedcore.core.events import Admitted, Arrived, StepEvents
from pagedcore.observe.recorder import Recorder, RecorderInfo
from support.core_builders import make_request
from support.observed import FakeClock, make_add, make_finished, make_lookup
from support.traffic import Visit, chats, make_replay_limits, replay


def make_advisor(num_blocks: int = 64, clock: FakeClock | None = None) -> tuple[Recorder, Advisor]:
    info = RecorderInfo(model_name="m", block_size=16, num_blocks=num_blocks)
    recorder = Recorder(info, registry=CollectorRegistry())
    return recorder, Advisor(recorder, make_replay_limits(16, num_blocks), clock=clock or FakeClock())


def visit(number: int, prompt: list[int], **fields: str) -> Visit:
    return Visit(number * 5, make_request(f"r{number}", prompt, max_tokens=3, **fields), [7, 8, 9])


def serve(recorder: Recorder, visits: list[Visit], num_blocks: int = 64) -> float:
    return replay(visits, block_size=16, num_blocks=num_blocks, record=recorder.record)


def test_before_any_request_the_advice_is_empty_and_says_so() -> None:
    recorder, advisor = make_advisor()
    assert advisor.advice().as_dict() == {
        "sentences": ["No request has been looked up yet, so there is nothing to advise."],
        "hit_rate": None,
        "ideal_hit_rate": None,
        "curve": [],
        "costliest_prefixes": [],
        "num_lookups": 0,
        "window_s": 0.0,
    }
    recorder.close()


def test_advice_is_plain_json_with_the_measured_rates_and_the_whole_curve() -> None:
    clock = FakeClock(500.0)
    recorder, advisor = make_advisor(clock=clock)
    rate = serve(recorder, [visit(number, [*range(64), number]) for number in range(20)])
    advice = json.loads(json.dumps(advisor.advice().as_dict()))
    assert advice["hit_rate"] == rate == 19 * 64 / (20 * 65)
    assert advice["num_lookups"] == 20
    assert advice["window_s"] == 500.0
    assert advice["curve"][0] == {"pool_factor": 0.25, "num_blocks": 32, "block_size": 8, "hit_rate": rate}
    assert len(advice["curve"]) == 24
    assert advice["sentences"] == ["The cache needs no change: it serves 94 % of a possible 94 %."]
    recorder.close()


def test_prefixes_that_are_evicted_and_computed_again_are_listed_by_cost_with_the_engines_hash() -> None:
    recorder, advisor = make_advisor(num_blocks=12)
    prompts = [[1000 * document + token for token in range(16 * (4 + document))] for document in range(3)]
    hashes = list[str]()

    def note(step: StepEvents) -> None:
        hashes.extend(event.block_hash.hex() for event in step.events if type(event).__name__ == "BlockEvicted")

    recorder.add_listener(note)
    serve(recorder, [visit(number, [*prompts[number % 3], number], tenant="acme") for number in range(9)], num_blocks=12)
    costliest = advisor.advice().costliest_prefixes
    assert sorted(prefix.num_tokens for prefix in costliest) == [64, 80, 96]
    assert {prefix.tenant for prefix in costliest} == {"acme"}
    assert [prefix.num_requests for prefix in costliest] == [2, 2, 2]
    assert all(prefix.prefix in hashes for prefix in costliest)
    costs = [prefix.recomputed_tokens for prefix in costliest]
    assert costs == sorted(costs, reverse=True)
    assert all(0 < prefix.recomputed_tokens <= prefix.num_requests * prefix.num_tokens for prefix in costliest)
    assert sum(costs) == 16 * recorder.stats().miss_blocks["evicted"]
    latest = {prefix.num_tokens: prefix.latest_request_id for prefix in costliest}
    assert latest == {64: "r6", 80: "r7", 96: "r8"}  # the last three, each of its document
    recorder.close()


def test_the_reason_for_smaller_blocks_is_how_far_shared_prefixes_reach_into_a_block() -> None:
    recorder, advisor = make_advisor()
    serve(recorder, [visit(number, [*range(28), *range(100 * number, 100 * number + 20)]) for number in range(1, 20)])
    assert "Block size 8 would gain 16 points: shared prefixes end 12 tokens into a block on average." in advisor.advice().sentences
    recorder.close()


def test_a_tenant_learns_nothing_of_another_ones_tokens() -> None:
    """Sentences hold names and numbers; prefixes are hashes."""
    recorder, advisor = make_advisor(num_blocks=16)
    secret = list(range(987_000, 987_064))
    serve(recorder, [visit(number, [*secret, number], tenant=f"t{number % 2}") for number in range(8)], num_blocks=16)
    assert "9870" not in json.dumps(advisor.advice().as_dict()["sentences"])
    assert all(len(prefix.prefix) == 64 for prefix in advisor.advice().costliest_prefixes)
    recorder.close()


def test_requests_that_all_have_one_id_are_studied_as_what_they_were() -> None:
    """A caller may send the same X-Request-Id each time. What is studied late must not be taken for the last of them."""
    told = []
    for one_name in (False, True):
        recorder, advisor = make_advisor(num_blocks=12)
        visits = [visit(0 if one_name else number, [*range(number % 3, 170 - 50 * (number % 2))]) for number in range(12)]
        serve(recorder, [replace(one, turn=5 * number) for number, one in enumerate(visits)], num_blocks=12)
        advice = advisor.advice()
        told.append(replace(advice, costliest_prefixes=tuple(replace(one, latest_request_id="") for one in advice.costliest_prefixes)))
        recorder.close()
    assert told[0].costliest_prefixes == told[1].costliest_prefixes != ()
    assert told[0] == told[1]


def test_tenants_do_not_share_in_the_prediction_either() -> None:
    recorder, advisor = make_advisor()
    rate = serve(recorder, [visit(number, [*range(64), number], tenant=f"t{number}") for number in range(8)])
    assert rate == 0.0
    assert {point.hit_rate for point in advisor.advice().curve} == {0.0}
    recorder.close()


def test_an_engine_without_prefix_caching_is_told_what_it_would_gain() -> None:
    recorder = Recorder(RecorderInfo(model_name="m", block_size=16, num_blocks=64), registry=CollectorRegistry())
    advisor = Advisor(recorder, replace(make_replay_limits(16, 64), enable_prefix_caching=False))
    replay([visit(number, [*range(64), number]) for number in range(20)], block_size=16, num_blocks=64, record=recorder.record)
    advice = advisor.advice()
    assert advice.sentences == ("Prefix caching is off; with it, this pool would serve 94 % of the prompt tokens.",)
    assert advice.ideal_hit_rate == max(point.hit_rate for point in advice.curve if point.block_size == 16)
    recorder.close()


def test_a_thread_digests_what_waits_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advisor_module, "DIGEST_AT_EVENTS", 20)
    recorder, advisor = make_advisor()
    started = list[advisor_module.threading.Thread]()
    original = advisor_module.threading.Thread.start
    monkeypatch.setattr(advisor_module.threading.Thread, "start", lambda thread: (started.append(thread), original(thread)))
    serve(recorder, [visit(number, [*range(64), number]) for number in range(30)])
    for thread in started:
        thread.join(60.0)
    assert started
    assert {thread.name for thread in started} == {"pagedcore-advisor"}
    assert advisor._study.sketch.num_lookups >= 4
    assert advisor.advice().num_lookups == 30
    recorder.close()


def test_when_digesting_falls_behind_what_waits_is_dropped_and_the_rest_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advisor_module, "MAX_WAITING_EVENTS", 60)
    monkeypatch.setattr(advisor_module, "DIGEST_AT_EVENTS", 60)
    recorder, advisor = make_advisor()
    with advisor._digesting:
        serve(recorder, [visit(number, [*range(64), number]) for number in range(40)])
        assert sum(len(events) for _, events, _ in advisor._waiting) <= 80
    serve(recorder, [visit(number, [*range(64), number]) for number in range(40, 45)])
    advice = advisor.advice()
    assert 5 <= advice.num_lookups < 45
    assert advice.curve[-1].hit_rate > 0.5
    assert not advisor._requests
    recorder.close()


def test_events_of_requests_that_were_not_seen_arriving_are_left_out() -> None:
    recorder, advisor = make_advisor()
    steps = list[StepEvents]()
    replay([visit(number, [*range(64), number]) for number in range(4)], block_size=16, num_blocks=64, record=steps.append)
    for step in steps[2:]:
        advisor.record(step)
    assert advisor.advice().num_lookups == 3
    recorder.close()


def test_a_request_that_is_refused_because_its_id_is_in_use_ends_no_other() -> None:
    recorder, advisor = make_advisor()
    first, second = (make_add("a", num_tokens=33) for _ in range(2))
    recorder.record(StepEvents(now_s=1000.0, events=[Arrived(first, 1000.0), Arrived(second, 1000.0)]))
    recorder.record(StepEvents(now_s=1001.0, events=[make_finished(second, 1001.0, "rejected")]))
    recorder.record(StepEvents(now_s=1002.0, events=[Admitted("a", 1002.0, replace(make_lookup(), num_prompt_tokens=33))]))
    assert advisor.advice().num_lookups == 1
    recorder.close()


def test_a_recorded_trace_gives_the_same_advice_offline(tmp_path: Path) -> None:
    recorder, advisor = make_advisor(num_blocks=512)
    advisor.record_trace(tmp_path / "t.jsonl")
    visits = chats(3, num_chats=8, num_turns=4)
    serve(recorder, visits, num_blocks=512)
    advisor.close()
    recorded = list(read_trace(tmp_path / "t.jsonl"))
    assert sorted(request.request_id for request in recorded) == sorted(v.request.request_id for v in visits)
    by_id = {request.request_id: request for request in recorded}
    assert by_id["r0"].prompt_token_ids == visits[0].request.prompt_token_ids
    assert by_id["r0"].num_output_tokens == len(visits[0].answer)
    live, offline = advisor.advice(), advise(recorded, 16, 512)
    assert [replace(point, hit_rate=0.0) for point in offline.curve] == [replace(point, hit_rate=0.0) for point in live.curve]
    assert max(abs(one.hit_rate - other.hit_rate) for one, other in zip(live.curve, offline.curve, strict=True)) < 0.01
    recorder.close()


def test_a_thread_that_digests_leaves_the_interpreter_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It pauses many times as long as it studied; whoever asks for advice waits for no pause."""
    pauses = list[tuple[str, float]]()
    monkeypatch.setattr(advisor_module, "DIGEST_AT_EVENTS", 20)
    monkeypatch.setattr(advisor_module.time, "sleep", lambda s: pauses.append((threading.current_thread().name, s)))
    recorder, advisor = make_advisor()
    monkeypatch.setattr(advisor_module.time, "thread_time", itertools.count().__next__)
    serve(recorder, [visit(number, [*range(64), number]) for number in range(30)])
    for thread in threading.enumerate():
        if thread.name == "pagedcore-advisor":
            thread.join(60.0)
    studied = len(pauses)
    assert pauses
    assert set(pauses) == {("pagedcore-advisor", advisor_module.PAUSES_PER_STUDY)}
    assert advisor.advice().num_lookups == 30
    assert len(pauses) == studied
    recorder.close()
