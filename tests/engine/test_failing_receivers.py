"""Whoever takes something from the engine thread may fail; what others were to get, and how the engine goes on, is the same."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pagedcore import process_endings
from pagedcore.console.tenants import TenantBook
from pagedcore.core.events import Admitted, FirstToken, PrefillChunk
from pagedcore.errors import EngineClosedError
from pagedcore.inbox import fulfil
from pagedcore.messages import RequestUpdate
from pagedcore.outboxes import Outboxes
from support.core_builders import make_request
from support.engine_builder import Built, make_engine
from support.remote_engines import wait_for

ENDLESS = 10_000
LONG = {"max_model_len": 20_100, "num_blocks": 4096}


class Receiver:
    """Takes updates, or fails each time after it has taken the first `num_taken` lists of them."""

    def __init__(self, num_taken: int | None = None) -> None:
        self.told: list[RequestUpdate] = []
        self.num_failures = 0
        self.missed: set[str] = set()
        """Ids of requests whose end it was told and did not take."""
        self._num_left = num_taken
        self.is_over = threading.Event()

    def __call__(self, updates: list[RequestUpdate]) -> None:
        if self._num_left is not None:
            self._num_left -= 1
            if self._num_left < 0:
                self.num_failures += 1
                self.missed |= {update.request_id for update in updates if update.finish_reason is not None}
                raise ConnectionError("whoever listened is gone")
        self.told += updates
        if any(update.finish_reason is not None for update in updates):
            self.is_over.set()

    def statuses(self) -> dict[str, str]:
        return {update.request_id: update.status for update in self.told if update.finish_reason is not None}


def failing(*_: object) -> Any:
    raise ZeroDivisionError("a fault of whoever is called")


class Once:
    """Fails at its first call, and does what it stands for at later ones."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.num_calls = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == 1:
            raise ZeroDivisionError("something of one request's")
        return self._function(*arguments, **named)


def serve_five(built: Built) -> None:
    """In the same steps."""
    receivers = [Receiver() for _ in range(5)]
    with built.loop.gathering():
        for number, receiver in enumerate(receivers):
            built.loop.submit(make_request(f"r{number}", [1, number], max_tokens=3), receiver)
    for receiver in receivers:
        assert receiver.is_over.wait(60)
    built.settle()


def check_works(built: Built, request_id: str = "later") -> None:
    """The engine still serves."""
    later = Receiver()
    built.loop.submit(make_request(request_id, [5, 6], max_tokens=2), later)
    assert later.is_over.wait(60)
    assert later.statuses() == {request_id: "completed"}


@pytest.mark.parametrize("num_taken", [0, 3], ids=["its first update", "a later one"])
def test_a_receiver_that_fails_loses_its_own_request_and_nobody_elses(num_taken: int, caplog: pytest.LogCaptureFixture) -> None:
    built = make_engine(**LONG)
    broken, others = Receiver(num_taken), [Receiver() for _ in range(4)]
    with built.loop.gathering():  # it stands among the others
        for number, other in enumerate(others[:2]):
            built.loop.submit(make_request(f"r{number}", [1, number], max_tokens=30), other)
        built.loop.submit(make_request("broken", [1, 2], max_tokens=ENDLESS), broken)
        for number, other in enumerate(others[2:], 2):
            built.loop.submit(make_request(f"r{number}", [1, number], max_tokens=30), other)
    for number, other in enumerate(others):
        assert other.is_over.wait(60)
        assert other.statuses() == {f"r{number}": "completed"}
        assert sum(len(update.new_token_ids) for update in other.told) == 30
    built.settle()  # the one that nobody takes any more has been given up
    check_works(built)
    assert built.engine.stats().num_finished == {"completed": 5, "aborted": 1, "rejected": 0, "error": 0}
    assert "were not taken by" in caplog.text
    assert "whoever listened is gone" in caplog.text
    built.engine.close_sync()


def test_one_whose_refusal_is_not_taken_keeps_no_other_from_its_own() -> None:
    built, broken, other = make_engine(), Receiver(0), Receiver()
    with built.loop.gathering():
        for request_id, receiver in (("broken", broken), ("other", other)):
            built.loop.submit(make_request(request_id, list(range(300))), receiver)
    assert other.is_over.wait(60)
    assert (other.statuses(), broken.num_failures) == ({"other": "rejected"}, 1)
    check_works(built)
    built.engine.close_sync()


def gated(*receivers: Receiver, num_in_inbox: int = 3) -> Built:
    """An engine whose thread is with its device: each receiver has a request there, and some that lie in the inbox."""
    built = make_engine(gate_open=False, max_num_seqs=2, **LONG)
    with built.loop.gathering():
        for number, receiver in enumerate(receivers):
            built.loop.submit(make_request(f"runs {number}", [number, 2], max_tokens=ENDLESS), receiver)
    assert built.runner.waiting.wait(60)
    for turn in range(num_in_inbox):
        for number, receiver in enumerate(receivers):
            built.loop.submit(make_request(f"waits {number}.{turn}", [number, 2], max_tokens=ENDLESS), receiver)
    return built


@pytest.mark.parametrize("end", ["the device is lost", "the device never answers", "closed"])
def test_at_the_end_each_hears_of_its_own_requests_whoever_else_fails(end: str) -> None:
    first, broken, last = Receiver(), Receiver(0), Receiver()
    built = gated(first, broken, last)
    if end == "the device is lost":
        built.runner.submit_errors += [RuntimeError("device lost") for _ in range(9)]
        built.runner.gate.set()
        built.loop.join(60)
    elif end == "closed":
        threading.Timer(0.05, built.runner.gate.set).start()
        built.loop.close()
    else:
        built.loop.close(timeout_s=0.05)
        built.runner.gate.set()
        built.loop.join(60)
    ran = "aborted" if end == "closed" else "error"
    assert first.statuses() == {"runs 0": ran, "waits 0.0": "error", "waits 0.1": "error", "waits 0.2": "error"}
    assert last.statuses() == {"runs 2": ran, "waits 2.0": "error", "waits 2.1": "error", "waits 2.2": "error"}
    assert broken.missed == {"runs 1", "waits 1.0", "waits 1.1", "waits 1.2"}, "it was told each end, too"
    assert built.engine.stats().num_running == 0
    assert built.runner.is_closed


def test_outboxes_say_whose_updates_were_lost() -> None:
    outboxes, broken, other = Outboxes(), Receiver(0), Receiver()
    for request_id, receiver in (("a", broken), ("b", other), ("c", broken)):
        outboxes.open(request_id, receiver)
    updates = [RequestUpdate(request_id, [1]) for request_id in "abc"]
    assert outboxes.deliver(updates, lambda _: None) == [("a", broken), ("c", broken)]
    assert [update.request_id for update in other.told] == ["b"]
    outboxes.end_all(EngineClosedError("closed"))
    assert other.statuses() == {"b": "error"}
    assert (broken.num_failures, len(outboxes)) == (3, 0)


def test_who_ends_all_on_the_main_thread_and_is_interrupted_has_told_everybody() -> None:
    def interrupt(_: object) -> Any:
        raise KeyboardInterrupt

    outboxes, others = Outboxes(), [Receiver() for _ in range(4)]
    outboxes.open("a", others[0])
    outboxes.open("interrupts", interrupt)
    outboxes.open("b", others[1])
    for request_id, receiver in (("c", others[2]), ("interrupts, refused", interrupt), ("d", others[3])):
        outboxes.refuse(request_id, receiver, EngineClosedError("refused"))
    with pytest.raises(KeyboardInterrupt):
        outboxes.end_all(EngineClosedError("closed"))
    assert [receiver.statuses() for receiver in others] == [{"a": "error"}, {"b": "error"}, {"c": "rejected"}, {"d": "rejected"}]
    assert len(outboxes) == 0


def test_each_receiver_that_fails_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    built, receivers = make_engine(**LONG), [Receiver(0) for _ in range(3)]
    for number, receiver in enumerate(receivers):
        for turn in range(3):
            built.loop.submit(make_request(f"r{number}.{turn}", [1, number], max_tokens=ENDLESS), receiver)
    wait_for(lambda: all(len(receiver.missed) == 3 for receiver in receivers), "all were given up")
    assert all(receiver.num_failures > 1 for receiver in receivers)
    assert caplog.text.count("were not taken by") == 3
    built.engine.close_sync()


def test_an_observer_that_fails_costs_the_others_and_the_requests_nothing(caplog: pytest.LogCaptureFixture) -> None:
    built, seen = make_engine(), []
    built.loop.recorder.add_listener(failing)
    built.loop.recorder.add_listener(seen.append)
    check_works(built, "first")
    check_works(built, "second")
    built.settle()
    assert built.engine.stats().num_finished["completed"] == 2
    assert sum(step.num_generated_tokens for step in seen) == 4
    assert caplog.text.count("ZeroDivisionError: a fault") == 1, "said once"
    built.engine.close_sync()


@pytest.mark.parametrize("name", ["record", "maybe_flush", "flush", "complete", "received"])
def test_what_cannot_be_counted_is_generated_all_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = make_engine()
    monkeypatch.setattr(built.loop.recorder, name, failing)
    check_works(built, "first")
    check_works(built, "second")
    assert caplog.text.count("ZeroDivisionError: a fault") == 1, "said once"
    monkeypatch.undo()
    built.engine.close_sync()


@pytest.mark.parametrize("name", ["_count_output", "_count_group"])
def test_an_end_that_cannot_be_counted_is_one_that_is_missing_and_leaves_nothing_open(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built, seen = make_engine(max_num_seqs=8), []
    built.loop.recorder.add_listener(seen.append)
    book = built.loop.recorder._requests
    monkeypatch.setattr(book, name, Once(getattr(book, name)))
    serve_five(built)
    assert built.loop.recorder.open_requests() == []
    assert book._groups == {}
    assert built.engine.stats().num_finished["completed"] == 4
    assert built.engine.stats().num_running == built.engine.stats().num_active_blocks == 0
    assert sum(step.num_generated_tokens for step in seen) == built.engine.stats().sampled_tokens == 15
    assert [life.status for life in built.engine.history.lives()] == ["completed"] * 5
    built.engine.close_sync()
    assert sum(built.engine.stats().num_finished.values()) == 4, "nor is one counted at the end"


@pytest.mark.parametrize("kind", [Admitted, PrefillChunk, FirstToken])
def test_an_event_that_cannot_be_counted_costs_no_other_event(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    built = make_engine(max_num_seqs=8)
    handlers = built.loop.recorder._handlers
    once = Once(handlers[kind])
    monkeypatch.setitem(handlers, kind, once)
    serve_five(built)
    assert once.num_calls == 5
    assert built.loop.recorder.open_requests() == []
    assert built.engine.stats().num_finished["completed"] == 5
    built.engine.close_sync()


def test_an_event_that_an_observer_cannot_take_costs_it_no_other_event(monkeypatch: pytest.MonkeyPatch) -> None:
    built, tenants = make_engine(max_num_seqs=8), TenantBook()
    built.loop.recorder.add_listener(tenants.record)
    first_tokens = []
    for handlers in (built.engine.history._handlers, tenants._handlers):
        first_tokens.append(Once(handlers[FirstToken]))
        monkeypatch.setitem(handlers, FirstToken, first_tokens[-1])
    serve_five(built)
    assert [once.num_calls for once in first_tokens] == [5, 5]
    assert [life.status for life in built.engine.history.lives()] == ["completed"] * 5
    assert tenants._open == {}
    built.engine.close_sync()


@pytest.mark.parametrize(
    "odd", [{"request_class": ["x"]}, {"adapter": {"a": 1}}, {"traceparent": 7}], ids=["class", "adapter", "traceparent"]
)
def test_a_request_whose_labels_cannot_be_made_is_counted_like_those_beside_it(odd: dict[str, Any]) -> None:
    built, receivers = make_engine(max_num_seqs=8), [Receiver() for _ in range(3)]
    with built.loop.gathering():
        for number, receiver in enumerate(receivers):
            built.loop.submit(make_request(f"r{number}", [1, number], max_tokens=3, **(odd if number == 1 else {})), receiver)
    for receiver in receivers:
        assert receiver.is_over.wait(60)
    built.settle()
    assert built.engine.stats().num_finished["completed"] == 3
    assert built.loop.recorder.open_requests() == []
    assert built.loop.recorder.export_fault is None
    built.engine.close_sync()


@pytest.mark.parametrize("error", [SystemExit(2), asyncio.CancelledError(), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("place", ["receiver", "observer", "counting"])
def test_the_engine_thread_goes_on_from_what_would_end_it(place: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise error

    built, runs = make_engine(**LONG), Receiver()
    built.loop.submit(make_request("runs", [1, 2], max_tokens=100), runs)
    if place == "receiver":
        built.loop.submit(make_request("broken", [1, 3], max_tokens=ENDLESS), fail)
    elif place == "observer":
        built.loop.recorder.add_listener(fail)
    else:
        monkeypatch.setattr(built.loop.recorder, "record", fail)
    check_works(built)
    assert runs.is_over.wait(60)
    assert runs.statuses() == {"runs": "completed"}
    monkeypatch.undo()
    built.engine.close_sync()


@pytest.mark.parametrize("part", ["_books.close", "_inbox.refuse"])
def test_at_the_end_each_that_runs_is_told_whatever_one_part_raises(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*_: object) -> Any:
        raise SystemExit(2)

    runs, waits = Receiver(), Receiver()
    built = gated(runs, num_in_inbox=0)
    built.loop.submit(make_request("waits", [3]), waits)
    owner, name = part.split(".")
    monkeypatch.setattr(getattr(built.loop, owner), name, leave)
    with pytest.raises(SystemExit):
        built.loop.close(timeout_s=0.05)  # on this thread, since the engine's is with its device
    assert runs.statuses() == {"runs 0": "error"}
    assert waits.statuses() == ({"waits": "error"} if part == "_books.close" else {})
    monkeypatch.undo()
    built.runner.gate.set()
    built.loop.join(60)
    assert waits.statuses() == {"waits": "error"}


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_call_that_would_end_its_thread_raises_where_it_was_made(error: BaseException) -> None:
    def call() -> None:
        raise error

    built = make_engine()
    assert built.loop.call(call).exception(60) is error
    check_works(built)
    built.engine.close_sync()


def test_a_call_that_nobody_waits_for_any_more_is_left_out() -> None:
    from concurrent.futures import Future

    future: Future[int] = Future()
    assert future.cancel()
    fulfil(future, failing)


class Ending:
    def __init__(self, *, fails: bool = False) -> None:
        self.ends: list[str] = []
        self._fails = fails

    def close(self, timeout_s: float) -> None:
        self._end(f"closed within {timeout_s:g} s")

    def disown(self) -> None:
        self._end("disowned")

    def _end(self, how: str) -> None:
        self.ends.append(how)
        if self._fails:
            raise OSError("it cannot be ended")


@pytest.mark.parametrize(("end", "how"), [("close_living", "closed within 5 s"), ("disown_living", "disowned")])
def test_an_engine_that_cannot_be_ended_with_its_process_keeps_no_other_from_it(
    end: str, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_endings, "_living", type(process_endings._living)())
    ones = [Ending(), Ending(fails=True), Ending()]
    for one in ones:
        process_endings.belong_to_process(one)
    with caplog.at_level(logging.ERROR):
        getattr(process_endings, end)()
    assert [one.ends for one in ones] == [[how]] * 3
    assert "it cannot be ended" in caplog.text
