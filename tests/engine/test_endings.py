"""However an engine ends, the sums come out: each request that it took is counted once, as its caller was told, and none waits on."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from pagedcore import engine_loop
from pagedcore.engine_loop import EngineLoop
from pagedcore.errors import EngineClosedError, EngineError, InvalidRequestError
from pagedcore.messages import AddRequest, RequestUpdate
from pagedcore.structured_outputs import StructuredOutputsParams
from support.core_builders import make_request
from support.engine_builder import Built, make_engine
from support.fake_runner import VOCAB_SIZE

ENDLESS = 10_000
BY_HAND = {"max_model_len": 20_100, "num_blocks": 4096, "max_num_seqs": 2}
"""Of four requests two run and two wait."""


class Caller:
    """Takes the updates of any number of requests, and knows how each of them ended."""

    def __init__(self) -> None:
        self.statuses: dict[str, str] = {}
        self.errors: dict[str, Exception | None] = {}
        self.num_tokens: Counter[str] = Counter()

    def __call__(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            self.num_tokens[update.request_id] += len(update.new_token_ids)
            if update.finish_reason is not None:
                assert update.request_id not in self.statuses, f"{update.request_id!r} ended twice"
                self.statuses[update.request_id], self.errors[update.request_id] = update.status, update.error

    def counts(self) -> dict[str, int]:
        return dict(Counter(self.statuses.values()))


def requests(count: int, first: int = 0) -> list[AddRequest]:
    return [make_request(f"r{n}", [n % VOCAB_SIZE, *range(1, 20)], max_tokens=ENDLESS) for n in range(first, first + count)]


def busy(num_taken: int = 4, num_in_inbox: int = 3, **options: Any) -> tuple[Built, Caller]:
    """An engine whose thread waits for its device, with some requests that it has taken and some that lie in its inbox."""
    built, caller = make_engine(gate_open=False, **BY_HAND, **options), Caller()
    with built.loop.gathering():
        for request in requests(num_taken):
            built.loop.submit(request, caller)
    assert built.runner.waiting.wait(60)
    for request in requests(num_in_inbox, first=num_taken):
        built.loop.submit(request, caller)
    return built, caller


def close_once(built: Built, waits_for: threading.Event) -> None:
    """Close, and let the engine thread go on when it is to end."""
    closing = threading.Thread(target=built.engine.close_sync)
    closing.start()
    while built.loop.is_alive:
        pass
    waits_for.set()
    closing.join(60)


def counted(built: Built) -> dict[str, int]:
    """Ended requests by status, in the books and so in what is exported, with nothing open any more."""
    stats = built.engine.stats()
    assert (stats.num_running, stats.num_waiting, built.loop.recorder.open_requests()) == (0, 0, [])
    assert stats.prefix_cache_query_tokens == (stats.prefix_cache_hit_tokens + stats.computed_prompt_tokens + stats.abandoned_prompt_tokens)
    return {status: count for status, count in stats.num_finished.items() if count}


def check_history(built: Built, caller: Caller) -> None:
    lives = built.engine.history.lives()
    assert {life.request.request_id: life.status for life in lives} == caller.statuses
    assert all([event.name for event in life.events].count("finished") == 1 for life in lives)


@pytest.mark.parametrize("overlap", [False, True])
def test_closing_counts_what_runs_as_aborted_and_what_lies_in_the_inbox_as_failed(overlap: bool) -> None:
    built, caller = busy(overlap=overlap)
    close_once(built, built.runner.gate)
    assert caller.counts() == counted(built) == {"aborted": 4, "error": 3}
    assert {caller.statuses[f"r{n}"] for n in range(4)} == {"aborted"}
    assert isinstance(caller.errors["r6"], EngineClosedError)
    check_history(built, caller)


def test_a_failed_device_is_told_to_those_in_the_inbox_too_and_counted() -> None:
    built, caller = busy()
    built.runner.submit_errors += [RuntimeError("device lost") for _ in range(9)]
    built.runner.gate.set()
    built.loop.join(60)
    assert caller.counts() == counted(built) == {"error": 7}
    assert "device lost" in str(caller.errors["r6"])
    check_history(built, caller)


def _raise(*_: object) -> Any:
    raise ZeroDivisionError("a fault of ours")


BREAKS = [("schedule",), ("schedule", "end_all"), ("commit", "take_events"), ("schedule", "end_all", "take_events", "take_updates")]


@pytest.mark.parametrize("breaks", BREAKS, ids=str)
def test_a_crash_of_the_engine_thread_leaves_no_request_uncounted(breaks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that arrived in the very turn that crashed, and whatever else of the scheduler is broken."""
    built, caller = busy()
    for name in breaks:
        monkeypatch.setattr(built.loop._scheduler, name, _raise)
    built.runner.gate.set()
    built.loop.join(60)
    assert caller.counts() == counted(built) == {"error": 7}
    assert isinstance(caller.errors["r0"], EngineError)
    check_history(built, caller)
    with pytest.raises(EngineClosedError, match="a fault of ours"):
        built.loop.submit(make_request("later", [1]), caller)
    assert built.runner.is_closed
    assert counted(built) == {"error": 7}


def test_a_crash_counts_the_tokens_that_were_told() -> None:
    built, caller = make_engine(**BY_HAND), Caller()
    built.loop.submit(requests(1)[0], caller)
    while caller.num_tokens["r0"] < 5:
        pass
    built.loop.call(lambda: setattr(built.loop._scheduler, "schedule", _raise)).result(60)
    built.loop.join(60)
    assert built.engine.stats().generation_tokens >= caller.num_tokens["r0"] >= 5


def test_books_that_cannot_be_written_at_the_end_leave_no_caller_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    built, caller = busy()
    monkeypatch.setattr(built.loop.recorder, "record", _raise)
    close_once(built, built.runner.gate)
    assert caller.counts() == {"aborted": 4, "error": 3}


def test_a_device_that_never_answers_is_given_up_with_each_request_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    built, caller = busy()
    built.loop.close(timeout_s=0.05)
    assert caller.counts() == counted(built) == {"error": 7}
    assert "did not answer within 0.05 s" in str(caller.errors["r0"])
    built.runner.gate.set()  # and if it does after all, nothing is counted again
    built.loop.join(60)
    assert counted(built) == {"error": 7}
    assert built.runner.is_closed
    check_history(built, caller)


def test_a_thread_that_hangs_elsewhere_is_given_up_with_each_request_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "LENDING_S", 0.05)
    built, caller = make_engine(**BY_HAND), Caller()
    held, hangs = threading.Event(), threading.Event()
    with built.loop.gathering():
        for request in requests(3):
            built.loop.submit(request, caller)
        built.loop.call(lambda: (hangs.set(), held.wait(60)))
        built.loop.submit(requests(1, first=3)[0], caller)
    assert hangs.wait(60)
    built.loop.close(timeout_s=0.05)
    assert caller.counts() == counted(built) == {"error": 4}
    held.set()
    built.loop.join(60)
    assert counted(built) == {"error": 4}


def test_requests_that_come_while_an_engine_closes_are_refused_or_counted() -> None:
    """What `submit` takes is counted; what it does not, raises there."""
    built, callers = make_engine(**BY_HAND), [Caller() for _ in range(4)]
    taken, start = [0] * len(callers), threading.Barrier(len(callers) + 1)

    def send(index: int) -> None:
        start.wait()
        with suppress(EngineClosedError):
            for number in range(100_000):
                built.loop.submit(make_request(f"{index}-{number}", [1, 2], max_tokens=1), callers[index])
                taken[index] += 1

    threads = [threading.Thread(target=send, args=(index,)) for index in range(len(callers))]
    for thread in threads:
        thread.start()
    start.wait()
    while not built.engine.stats().num_finished["completed"]:
        pass
    built.engine.close_sync()
    for thread in threads:
        thread.join(60)
    told = sum((Counter(caller.counts()) for caller in callers), Counter[str]())
    assert told.total() == sum(taken) > 0
    assert counted(built) == dict(told)


def with_bad_grammar(request_id: str) -> AddRequest:
    return make_request(request_id, [1], structured_outputs=StructuredOutputsParams(regex="[ab"))


def test_a_request_whose_form_is_refused_in_the_engine_is_told_and_counted() -> None:
    built, caller = make_engine(**BY_HAND), Caller()
    built.loop.submit(with_bad_grammar("bad"), caller)
    built.settle()
    assert isinstance(caller.errors["bad"], InvalidRequestError)
    assert caller.counts() == counted(built) == {"rejected": 1}
    assert built.engine.stats().num_rejected["invalid"] == 1
    built.engine.close_sync()
    check_history(built, caller)


def test_one_that_is_to_be_refused_and_lies_in_the_inbox_at_the_end_is_told_and_counted() -> None:
    built, caller = busy(num_in_inbox=1)
    built.loop.submit(with_bad_grammar("bad"), caller)
    close_once(built, built.runner.gate)
    assert caller.statuses["bad"] == "error"
    assert caller.counts() == counted(built) == {"aborted": 4, "error": 2}


def test_what_only_warms_the_cache_up_is_no_traffic_at_an_end_either() -> None:
    built, caller = make_engine(**BY_HAND), Caller()
    built.loop.pause_recording()
    built.loop.submit(requests(1)[0], caller)
    built.engine.close_sync()
    assert caller.counts() == {"aborted": 1} or caller.counts() == {"error": 1}
    assert counted(built) == {}


def test_a_loop_that_was_never_started_counts_what_it_was_given() -> None:
    loop = _never_started()
    caller = Caller()
    loop._books.start()
    loop.submit(requests(1)[0], caller)
    loop.close()
    assert caller.counts() == {"error": 1}
    assert loop.stats().num_finished["error"] == 1


def _never_started() -> EngineLoop:
    from support.engine_builder import make_loop

    return make_loop()[0]
