"""No front can keep an engine waiting: gatherings are one at a time and a small share of the time, and questions are bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pagedcore.engine_loop import MAX_GATHERING_S
from pagedcore.errors import EngineClosedError
from pagedcore.remote.connection import MAX_WAITING_CALLS
from pagedcore.remote.frames import Answer, Call, Gather, decode_from_engine
from pagedcore.remote.gatherings import MAX_CREDIT_S, MIN_COST_S, SHARE, Gatherings
from support.remote_engines import Hosted, connected, greeted, raw_front, run


class Loop:
    """Remembers its gatherings, and that they ended."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.is_closed = False

    @contextmanager
    def gathering(self) -> Iterator[None]:
        if self.is_closed:
            raise EngineClosedError("closed")
        self.events.append("begin")
        yield
        self.events.append("end")


def make(now: list[float]) -> tuple[Gatherings, Loop]:
    loop: Any = Loop()
    return Gatherings(loop, clock=lambda: now[0]), loop


def test_one_gathering_at_a_time_whoever_asks() -> None:
    gatherings, loop = make([0.0])
    gatherings.begin("a")
    gatherings.begin("a")
    gatherings.begin("b")
    gatherings.end("b")
    assert loop.events == ["begin"]
    gatherings.end("a")
    gatherings.end("a")
    assert loop.events == ["begin", "end"]


def num_granted(now: list[float], length_s: float, until_s: float) -> int:
    """How many gatherings of a length a front gets that asks for one after the other."""
    gatherings, loop = make(now)
    while now[0] < until_s:
        gatherings.begin("a")
        now[0] += length_s
        gatherings.end("a")
    return loop.events.count("begin")


@pytest.mark.parametrize("length_s", [0.01, MAX_GATHERING_S, 4 * MAX_GATHERING_S])
def test_in_the_long_run_an_engine_waits_for_a_tenth_of_the_time(length_s: float) -> None:
    waited_s = num_granted([0.0], length_s, 100.0) * min(length_s, MAX_GATHERING_S)
    assert waited_s == pytest.approx(MAX_CREDIT_S - MAX_GATHERING_S + SHARE * 100.0, abs=2 * MAX_GATHERING_S)


def test_short_gatherings_are_had_one_after_the_other_and_still_have_a_price() -> None:
    now = [0.0]
    gatherings, loop = make(now)
    for _ in range(10_000):
        gatherings.begin("a")
        gatherings.end("a")
    assert loop.events.count("begin") == pytest.approx((MAX_CREDIT_S - MAX_GATHERING_S) / MIN_COST_S, abs=2)


def test_who_never_says_the_end_keeps_nobody_out_for_long() -> None:
    now = [0.0]
    gatherings, loop = make(now)
    gatherings.begin("a")
    now[0] = 0.9 * MAX_GATHERING_S
    gatherings.begin("b")
    assert loop.events == ["begin"]
    now[0] = MAX_GATHERING_S
    gatherings.begin("b")
    gatherings.end("a")
    assert loop.events == ["begin", "end", "begin"]


def test_a_closed_engine_gathers_nothing_and_nothing_is_held() -> None:
    gatherings, loop = make([0.0])
    loop.is_closed = True
    gatherings.begin("a")
    loop.is_closed = False
    gatherings.begin("b")
    assert loop.events == ["begin"]


def test_a_front_that_only_says_gather_holds_up_nobody(one: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    gathering = one.built.loop.gathering
    monkeypatch.setattr(one.built.loop, "gathering", lambda: (asked.append(None), gathering())[1])
    monkeypatch.setattr(one.server._desk.gatherings, "_clock", lambda: 0.0)
    monkeypatch.setattr(one.server._desk.gatherings, "_counted_s", 0.0)
    channel = greeted(raw_front(one))
    for _ in range(1000):
        channel.put(Gather(is_open=True))
    channel.put(Call(1, "stats", {}))
    assert isinstance(decode_from_engine(channel.read() or b""), Answer), "all of them have been read"
    assert len(asked) == 1
    with connected(one) as front:
        assert run(front, [1, 2, 3]).status == "completed"
    channel.close()


def test_a_front_that_asks_without_end_is_told_so_and_may_ask_again(one: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    is_released = threading.Event()
    monkeypatch.setattr(one.server._desk.calls, "answer", lambda *_: is_released.wait(60))
    channel = greeted(raw_front(one))
    for number in range(MAX_WAITING_CALLS + 3):
        channel.put(Call(number, "stats", {}))
    refused = [decode_from_engine(channel.read() or b"") for _ in range(3)]
    assert [answer.number for answer in refused] == [MAX_WAITING_CALLS, MAX_WAITING_CALLS + 1, MAX_WAITING_CALLS + 2]
    assert all("64 questions of this front wait" in answer.fault.message for answer in refused)
    is_released.set()
    answers = [decode_from_engine(channel.read() or b"") for _ in range(MAX_WAITING_CALLS)]
    assert sorted(answer.number for answer in answers) == list(range(MAX_WAITING_CALLS))
    channel.put(Call(99, "stats", {}))
    assert decode_from_engine(channel.read() or b"").fault is None
    channel.close()
