"""Questions through a socket: the same answers as in the engine's own process, and faults that stay their caller's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from pagedcore.errors import ConfigError, EngineError, InvalidRequestError
from support.remote_engines import Hosted, connected, run


def test_every_question_of_an_engine_is_answered_as_there(one: Hosted) -> None:
    engine = one.built.engine
    with connected(one) as front:
        run(front, [1, 2, 3], request_id="mine")
        assert front.plan.memory == engine.plan.memory
        assert front.history.find("mine") == engine.history.find("mine")
        assert front.history.find("unknown") is None
        assert front.history.recent(5, "mine") == engine.history.recent(5, "mine")
        assert front.advice().num_lookups == engine.advice().num_lookups == 1
        assert front.inspect_sync("explain", request_id="mine") == engine.inspect_sync("explain", request_id="mine")
        assert front.inspect_sync("stats")[0]["num_steps"] == 12
        front.check()
        with pytest.raises(InvalidRequestError, match="The question is"):
            front.inspect_sync("why")
        with pytest.raises(InvalidRequestError, match="no call 'rm'"):
            front.loop.ask("rm")
        text, content_type = asyncio.run(front.metrics_text())
        assert content_type.startswith("text/plain")
        assert b"# HELP" in text


def test_files_are_written_where_the_front_is(one: Hosted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with connected(one) as front:
        front.record_trace("requests.jsonl")
        run(front, [1, 2, 3])
        front.record_trace(None)
        front.trace("trace.json")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.jsonl", "trace.json"]
        with pytest.raises(ConfigError, match="cannot be written"):
            front.trace("no/such/folder.json")


def test_a_check_that_fails_there_fails_here(one: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("the books disagree")

    monkeypatch.setattr(one.built.loop._scheduler, "check_invariants", fail)
    with connected(one) as front, pytest.raises(AssertionError, match="the books disagree"):
        front.check()
    monkeypatch.undo()


def test_a_fault_in_an_answer_is_the_callers_and_nobody_elses(one: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one.built.loop._recorder, "stats", lambda: {}["missing"])
    with connected(one) as front:
        with pytest.raises(EngineError, match="KeyError: 'missing'"):
            front.stats()
        monkeypatch.undo()
        assert front.stats().num_steps == 0


def test_a_shared_engine_is_not_warmed_up_by_one_of_its_fronts(one: Hosted) -> None:
    with connected(one) as front, pytest.raises(EngineError, match="shared by several processes"):
        front.warm_up([[1, 2, 3]])


def test_what_cannot_travel_is_the_callers_error_and_the_link_goes_on(one: Hosted) -> None:
    with connected(one) as front:
        with pytest.raises(TypeError, match="object"):
            front.inspect_sync("explain", request_id=object())
        assert run(front, [1]).status == "completed"


def test_an_answer_of_another_type_than_asked_for_is_an_error_and_no_surprise(one: Hosted) -> None:
    with connected(one) as front:
        with pytest.raises(msgspec.ValidationError, match="Expected `array`"):
            front.loop.ask("stats", list[int])
        assert front.stats().num_steps == 0, "the link goes on"
