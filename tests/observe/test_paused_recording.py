"""A request counts by when it came: what came while recording was on is counted to its end, and what came in a pause is not, either way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from pagedcore.engine_loop import EngineLoop
from pagedcore.errors import NoAnswerError
from pagedcore.messages import AbortRequest, AddRequest, RequestUpdate
from pagedcore.structured_outputs import StructuredOutputsParams
from pagedcore.traffic import MAX_GROUPS, Door
from support.core_builders import make_request
from support.engine_builder import Built, make_engine
from support.remote_engines import ENDLESS, child_engine, wait_for

LONG = {"max_model_len": 20_100, "num_blocks": 4096}


class Caller:
    """Takes updates; knows what has begun and what has ended."""

    def __init__(self) -> None:
        self.begun: set[str] = set()
        self.ended: dict[str, str] = {}

    def __call__(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            self.begun.add(update.request_id)
            if update.finish_reason is not None:
                self.ended[update.request_id] = update.status


def sample(loop: EngineLoop, name: str, **labels: str) -> float:
    """Of the registry, as a scrape sees it."""
    loop.flush_metrics()
    exporter = loop.recorder._exporter
    assert exporter is not None
    samples = [sample for family in exporter._registry.collect() for sample in family.samples if sample.name == f"pagedcore_{name}"]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def balance(built: Built) -> tuple[float, float]:
    """Received and ended requests; what is open, and what the history says, must agree with them."""
    built.settle()
    received, ended = sample(built.loop, "received_requests_total"), sample(built.loop, "requests_total")
    assert built.loop.recorder.open_requests() == []
    assert sample(built.loop, "open_requests") == 0
    lives = built.engine.history.lives()
    assert all(life.status != "running" for life in lives)
    assert len({life.request.group_id for life in lives}) == ended
    stats = built.engine.stats()
    assert stats.prefix_cache_query_tokens == stats.prefix_cache_hit_tokens + stats.computed_prompt_tokens + stats.abandoned_prompt_tokens
    return received, ended


@contextmanager
def held(loop: EngineLoop) -> Iterator[None]:
    """The engine thread takes nothing until the end of the block; then all that was said meanwhile, in its order."""
    hold, is_held = threading.Event(), threading.Event()
    loop.call(lambda: (is_held.set(), hold.wait(60)))
    assert is_held.wait(60)
    try:
        yield
    finally:
        hold.set()


def waits_in(loop: EngineLoop, num_items: int) -> None:
    wait_for(lambda: loop._inbox._items.qsize() >= num_items, "it waits for the engine thread")


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("first", ["pause_recording", "start_recording"])
def test_what_comes_before_a_pause_or_a_start_is_taken_after_it(first: str, choices: int) -> None:
    built, caller = make_engine(), Caller()
    if first == "start_recording":
        built.loop.pause_recording()
    with ThreadPoolExecutor(1) as pool:
        with held(built.loop):
            change = pool.submit(getattr(built.loop, first))
            waits_in(built.loop, 1)
            for request in group("a", choices):
                built.loop.submit(request, caller)
        change.result(60)
    wait_for(lambda: len(caller.ended) == choices, "it has ended")
    assert balance(built) == ((1, 1) if first == "pause_recording" else (0, 0))
    built.engine.close_sync()


def group(name: str, choices: int, **options: Any) -> list[AddRequest]:
    return [
        make_request(f"{name}#{index}" if index else name, [1, 2], group_id=name, choice_index=index, num_choices=choices, **options)
        for index in range(choices)
    ]


@pytest.mark.parametrize("first", ["pause_recording", "start_recording"])
def test_the_choices_of_a_request_are_what_its_first_one_is(first: str) -> None:
    built, caller, (one, *others) = make_engine(), Caller(), group("g", 3)
    if first == "start_recording":
        built.loop.pause_recording()
    built.loop.submit(one, caller)
    getattr(built.loop, first)()
    for other in others:
        built.loop.submit(other, caller)
    wait_for(lambda: len(caller.ended) == 3, "all have ended")
    assert balance(built) == ((1, 1) if first == "pause_recording" else (0, 0))
    built.engine.close_sync()
    assert sample_after_close(built) == ((1, 1) if first == "pause_recording" else (0, 0))


def sample_after_close(built: Built) -> tuple[int, int]:
    return len({life.request.group_id for life in built.engine.history.lives()}), sum(built.engine.stats().num_finished.values())


def test_what_runs_when_a_pause_begins_is_counted_to_its_end_and_shown_as_long_as_it_is_open() -> None:
    built, caller = make_engine(**LONG), Caller()
    built.loop.submit(make_request("runs", [1, 2], max_tokens=10_000), caller)
    wait_for(lambda: caller.begun, "it runs")
    built.loop.pause_recording()
    num_steps = built.engine.stats().num_steps
    built.loop.submit(make_request("warms", [3, 4], max_tokens=10_000), caller)
    wait_for(lambda: caller.begun == {"runs", "warms"}, "both run")
    assert built.engine.history.find("runs")["status"] == "running"
    assert built.engine.history.find("warms") is None
    built.loop.submit(AbortRequest("runs"))
    wait_for(lambda: caller.ended == {"runs": "aborted"}, "the one has ended")
    found = built.engine.history.find("runs")
    assert found["status"] == "aborted"
    assert found["completion_tokens"] > 0
    assert sum(found["waiting_reason_ms"].values()) == pytest.approx(found["time_in_queue_ms"], abs=0.01)
    assert built.engine.stats().num_steps == num_steps, "the steps of a pause are not counted"
    built.loop.start_recording()
    built.loop.submit(AbortRequest("warms"))
    wait_for(lambda: len(caller.ended) == 2, "the other has ended, too")
    assert balance(built) == (1, 1)
    assert built.engine.history.find("warms") is None
    built.engine.close_sync()


def test_an_id_that_a_pause_has_seen_already_is_told_apart() -> None:
    """In a pause and after it: the same id ended, is open, or is asked for twice."""
    built, caller = make_engine(**LONG), Caller()
    built.loop.pause_recording()
    built.loop.submit(make_request("a", [1, 2], max_tokens=10_000), caller)
    wait_for(lambda: caller.begun, "it runs")
    built.loop.start_recording()
    built.loop.submit(make_request("a", [1, 2]), caller)  # in use: refused, and that is traffic
    wait_for(lambda: caller.ended == {"a": "rejected"}, "the second one is refused")
    built.loop.submit(AbortRequest("a"))
    wait_for(lambda: caller.ended == {"a": "aborted"}, "the first one has ended")
    built.loop.submit(make_request("a", [1, 2], max_tokens=10_000), caller)
    built.loop.pause_recording()
    built.loop.submit(make_request("a", [1, 2]), caller)  # the other way round
    wait_for(lambda: caller.ended == {"a": "rejected"}, "that one is refused")
    built.loop.submit(AbortRequest("a"))
    wait_for(lambda: caller.ended == {"a": "aborted"}, "it has ended")
    assert built.engine.stats().num_finished == {"completed": 0, "aborted": 1, "rejected": 1, "error": 0}
    built.settle()
    assert sample(built.loop, "received_requests_total") == 2
    assert [life.status for life in built.engine.history.lives()] == ["rejected", "aborted"]
    built.engine.close_sync()


def test_what_is_refused_in_a_pause_is_not_counted_and_what_was_received_before_is() -> None:
    built, caller = make_engine(), Caller()

    def bad(request_id: str) -> AddRequest:
        return make_request(request_id, [1], structured_outputs=StructuredOutputsParams(regex="[ab"))

    with ThreadPoolExecutor(1) as pool:
        with held(built.loop):
            change = pool.submit(built.loop.pause_recording)
            waits_in(built.loop, 1)
            built.loop.submit(bad("before"), caller)
            built.loop.submit(make_request("too long", [1] * 300), caller)
        change.result(60)
    built.loop.submit(bad("after"), caller)
    built.loop.submit(make_request("after, too long", [1] * 300), caller)
    wait_for(lambda: len(caller.ended) == 4, "all are refused")
    assert balance(built) == (2, 2)
    built.engine.close_sync()


@pytest.mark.parametrize("gate_open", [True, False], ids=["in order", "with a device that does not answer"])
def test_an_engine_that_ends_in_a_pause_counts_what_it_had_received_before(*, gate_open: bool) -> None:
    built, caller = make_engine(**LONG), Caller()
    built.loop.submit(make_request("runs", [1, 2], max_tokens=10_000), caller)
    wait_for(lambda: caller.begun, "it runs")
    built.loop.pause_recording()
    built.loop.submit(make_request("warms", [3, 4], max_tokens=10_000), caller)
    wait_for(lambda: len(caller.begun) == 2, "both run")
    if not gate_open:
        built.runner.waiting.clear()
        built.runner.gate.clear()
        assert built.runner.waiting.wait(60)
    built.loop.submit(make_request("in the inbox", [5]), caller)
    built.loop.close(timeout_s=60.0 if gate_open else 0.05)
    built.runner.gate.set()
    built.loop.join(60)
    assert len(caller.ended) == 3
    stats = built.engine.stats()
    assert {status: count for status, count in stats.num_finished.items() if count} == {"aborted" if gate_open else "error": 1}
    assert [life.request.request_id for life in built.engine.history.lives()] == ["runs"]
    assert built.loop.recorder.open_requests() == []


def test_a_refused_form_is_counted_when_the_engine_fails_before_it_has_told() -> None:
    built, caller = make_engine(), Caller()

    def fail(*_: object) -> Any:
        raise ZeroDivisionError("a fault of ours")

    with held(built.loop):
        built.loop.submit(make_request("bad", [1], structured_outputs=StructuredOutputsParams(regex="[ab")), caller)
        built.loop._scheduler.take_events = fail  # type: ignore[method-assign]
    built.loop.join(60)
    assert caller.ended == {"bad": "rejected"}
    assert built.engine.stats().num_finished["rejected"] == 1


def test_an_engine_in_a_child_process_counts_the_same() -> None:
    """There the parent has received what the child ends: a request that is sent before a pause, or compiled for longer, is traffic."""
    with child_engine(metrics_instance="paused-1") as engine:
        mirror, caller = engine.loop._mirror, Caller()  # type: ignore[attr-defined]
        assert mirror is not None

        def total(name: str) -> float:
            from prometheus_client import REGISTRY

            engine.loop.flush_metrics()
            samples = [one for family in REGISTRY.collect() for one in family.samples if one.name == f"pagedcore_{name}_total"]
            return sum(one.value for one in samples if one.labels["engine"] == "paused-1")

        runs = engine.generate_sync([1, 2], ENDLESS)
        next(runs)
        engine.loop.pause_recording()
        warms = engine.generate_sync([3, 4], ENDLESS)
        next(warms)
        runs.close()
        wait_for(lambda: total("requests") == 1, "it is counted in the pause")
        for request in group("g", 2):
            engine.loop.submit(request, caller)
        engine.loop.start_recording()
        warms.close()
        wait_for(lambda: len(caller.ended) == 2, "the choices have ended")
        wait_for(lambda: not engine.loop._requests._by_id, "all have ended")  # type: ignore[attr-defined]
        assert (total("received_requests"), total("requests")) == (1, 1)
        assert mirror.uncounted._choices == {}
        assert asyncio.run(engine.is_ready())


def test_a_pause_that_the_engine_does_not_hear_of_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered(name: str, *_: object, **__: object) -> Any:
        raise NoAnswerError(f"The engine process did not answer {name!r} within 30 s.")

    with child_engine(metrics_instance="paused-2") as engine, monkeypatch.context() as patch:
        patch.setattr(engine.loop, "ask", unanswered)
        with pytest.raises(NoAnswerError):
            engine.loop.pause_recording()
        patch.undo()
        caller = Caller()
        engine.loop.submit(make_request("a", [1, 2]), caller)
        wait_for(lambda: caller.ended == {"a": "completed"}, "it has ended")
        wait_for(lambda: engine.stats().num_finished["completed"] == 1, "and is counted")


def test_a_pause_whose_caller_is_interrupted_is_over_at_once() -> None:
    built, caller = make_engine(), Caller()
    call = built.loop.call

    class Interrupted:
        def result(self) -> None:
            raise KeyboardInterrupt

    def interrupt(function: Any) -> Any:
        pending = call(function)
        return Interrupted() if function == built.loop._pause_recording else pending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(built.loop, "call", interrupt)
        with pytest.raises(KeyboardInterrupt):
            built.loop.pause_recording()
    built.loop.submit(make_request("a", [1, 2]), caller)
    wait_for(lambda: caller.ended == {"a": "completed"}, "it has ended")
    assert balance(built) == (1, 1)
    built.engine.close_sync()


@pytest.mark.parametrize("lost", [NoAnswerError("The engine process did not answer within 30 s."), KeyboardInterrupt()])
@pytest.mark.parametrize("change", ["pause_recording", "start_recording"])
def test_a_change_whose_answer_is_lost_leaves_an_engine_that_counts(change: str, lost: BaseException) -> None:
    with child_engine(metrics_instance=f"paused-{change}-{type(lost).__name__}") as engine:
        if change == "start_recording":
            engine.loop.pause_recording()
        ask, caller = engine.loop.ask, Caller()  # type: ignore[attr-defined]

        def deaf(name: str, *arguments: Any, **named: Any) -> Any:
            answer = ask(name, *arguments, **named)
            if name == change:
                raise lost
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.loop, "ask", deaf)
            with pytest.raises(type(lost)):
                getattr(engine.loop, change)()
        engine.loop.submit(make_request("a", [1, 2]), caller)
        wait_for(lambda: caller.ended == {"a": "completed"}, "it has ended")
        wait_for(lambda: engine.stats().num_finished["completed"] == 1, "and is counted")
        assert engine.stats().num_steps > 0


def test_a_door_forgets_requests_of_which_choices_never_come() -> None:
    door = Door(is_counting=True)
    for number in range(2 * MAX_GROUPS):
        assert door.admits(make_request(f"g{number}", [1], num_choices=2))
    assert len(door._groups) == MAX_GROUPS
    door.is_counting = False
    assert door.admits(make_request("last#1", [1], group_id=f"g{2 * MAX_GROUPS - 1}", choice_index=1, num_choices=2))
    assert not door.admits(make_request("first#1", [1], group_id="g0", choice_index=1, num_choices=2))
    assert len(door._groups) == MAX_GROUPS - 1
