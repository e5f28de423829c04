"""The questions that one engine answers, on a real engine with a fake runner."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pagedcore import InvalidRequestError, SamplingParams
from pagedcore.async_engine import AsyncEngine
from pagedcore.client import RequestContext
from support.engine_builder import make_engine, make_loop

PARAMS = SamplingParams(max_tokens=3)
STEM = list(range(1, 25))


@dataclass(frozen=True)
class Words:
    """A tokenizer that writes token 7 as <7>."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        return "".join(f"<{token_id}>" for token_id in token_ids)


def run(engine: AsyncEngine, request_id: str, prompt: list[int], tenant: str | None = None) -> None:
    list(engine.generate_sync(prompt, PARAMS, request_id, context=RequestContext(tenant=tenant)))


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    """Three requests: two of nobody, the second leaves the first one at token 29, and one of tenant "red"."""
    loop, _ = make_loop(enable_prefix_caching=True)
    engine = AsyncEngine(loop=loop)
    engine._inspector._text = Words()  # type: ignore[assignment]
    run(engine, "first", [*STEM, *range(25, 35)])
    run(engine, "second", [*STEM, *range(25, 30), *range(1, 11)])
    run(engine, "third", [36, 37, 38, 39] * 5, tenant="red")
    yield engine
    engine.close_sync()


def ask(engine: AsyncEngine, question: str, **arguments: Any) -> dict[str, Any]:
    (answer,) = engine.inspect_sync(question, **arguments)
    json.dumps(answer, allow_nan=False)  # plain, and no NaN
    return answer


def test_stats_are_engine_stats_with_rates_and_what_the_engine_is(engine: AsyncEngine) -> None:
    answer, snapshot = ask(engine, "stats"), engine.stats()
    assert answer["prefix_cache_query_tokens"] == snapshot.prefix_cache_query_tokens == 34 + 39 + 20
    assert answer["hit_rate"] == {"page": 3 / 10, "prefix": 24 / 93, "pool": 3 / 14, "ideal": 24 / 93}
    assert answer["last_minute"]["hit_rate"]["prefix"] == 24 / 93
    assert (answer["block_size"], answer["num_blocks"], answer["model"]) == (8, 256, "fake")
    assert answer["last_minute"]["num_ended"] == answer["last_minute"]["num_first_tokens"] == 3


def test_an_idle_engine_has_no_rates() -> None:
    built = make_engine()
    try:
        assert ask(built.engine, "stats")["hit_rate"] == {"page": None, "prefix": None, "pool": None, "ideal": None}
    finally:
        built.engine.close_sync()


def test_an_engine_that_looks_nothing_up_knows_no_ideal() -> None:
    built = make_engine(enable_prefix_caching=False)
    try:
        list(built.engine.generate_sync([*range(1, 25)], SamplingParams(max_tokens=1)))
        answer = ask(built.engine, "stats")
        expected = {"page": 0.0, "prefix": 0.0, "pool": 0.0, "ideal": None}
        assert (answer["enable_prefix_caching"], answer["hit_rate"], answer["last_minute"]["hit_rate"]) == (False, expected, expected)
    finally:
        built.engine.close_sync()


def test_an_explanation_says_where_the_prompt_left_the_cached_one_with_its_text(engine: AsyncEngine) -> None:
    answer = ask(engine, "explain", request_id="second")
    assert answer["tokens"] == {"live": 0, "pool": 24, "host": 0, "computed": 15, "abandoned": 0}
    assert answer["miss"] == {"diverged": 1}
    assert answer["first_divergence"]["token"] == answer["nearest_cached_prefix_tokens"] == 29
    assert answer["first_divergence"]["text_before"].endswith("<24><25><26><27><28><29>")
    assert answer["first_divergence"]["text_after"] == "".join(f"<{token}>" for token in range(1, 11))


def test_text_is_the_own_tenants_unless_the_operator_may_see_all() -> None:
    engine = make_engine().engine
    engine._inspector._text = Words()  # type: ignore[assignment]
    try:
        run(engine, "one", [36, 37, 38, 39] * 5, tenant="red")
        run(engine, "two", [*[36, 37, 38, 39] * 3, 1, 2, *[40] * 8], tenant="red")
        own = ask(engine, "explain", request_id="two", tenant="red", is_operator=False)
        assert own["first_divergence"] == {
            "token": 12,
            "text_before": "<36><37><38><39>" * 3,
            "text_after": "<1><2>" + "<40>" * 8,
        }
        assert "prompt_head" not in own
        for silent in ({}, {"show_text": "none"}, {"show_text": "none", "tenant": "red"}):
            assert "<" not in json.dumps(ask(engine, "explain", request_id="two", **silent))
        shown = ask(engine, "explain", request_id="two", show_text="all")
        assert shown["first_divergence"] == own["first_divergence"]
        assert shown["prompt_head"].startswith("<36><37>")
    finally:
        engine.close_sync()


def test_a_tenant_is_told_of_his_own_requests_only(engine: AsyncEngine) -> None:
    red = {"tenant": "red", "is_operator": False}
    assert ask(engine, "explain", request_id="first", **red) == ask(engine, "request", request_id="first", **red) == {}
    assert ask(engine, "explain", request_id="third", tenant="blue", is_operator=False) == {}
    assert [one["request_id"] for one in ask(engine, "requests", **red)["requests"]] == ["third"]
    assert ask(engine, "request", request_id="third", **red)["tenant"] == "red"


def test_an_isolated_miss_is_shown_to_the_operator_alone(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = engine.loop.recorder
    found = recorder.explained("third")
    assert found is not None
    report, reasons = found
    isolated = (type(report)(**{**_fields(report), "miss_blocks": {"isolated": 2}}), ("isolated", "isolated"))
    monkeypatch.setattr(recorder, "explained", lambda _: isolated)
    assert ask(engine, "explain", request_id="third")["miss"] == {"isolated": 2}
    own = ask(engine, "explain", request_id="third", tenant="red", is_operator=False)
    assert own["miss"] == {"cold": 2}
    assert "isolated" not in json.dumps(own)
    assert "another salt" not in json.dumps(own)
    assert reasons == ("cold", "cold")


def _fields(report: Any) -> dict[str, Any]:
    return {name: getattr(report, name) for name in report.__dataclass_fields__}


def test_requests_are_listed_newest_first_found_by_a_word_and_cut(engine: AsyncEngine) -> None:
    def names(**arguments: Any) -> list[str]:
        return [one["request_id"] for one in ask(engine, "requests", **arguments)["requests"]]

    assert names() == ["third", "second", "first"]
    assert names(limit=1) == ["third"]
    assert names(search="RED") == ["third"]
    assert names(search="no such word") == []


def test_a_timeline_has_its_events_and_an_unknown_one_is_empty(engine: AsyncEngine) -> None:
    record = ask(engine, "request", request_id="second")
    assert [event["name"] for event in record["events"]] == ["arrived", "queued", "admitted", "prefill_chunk", "first_token", "finished"]
    assert ask(engine, "request", request_id="nobody") == ask(engine, "explain", request_id="nobody") == {}


def test_blocks_advice_and_trace_are_those_of_the_engine(engine: AsyncEngine) -> None:
    cells = ask(engine, "blocks")
    assert (cells["states"].count("c"), cells["states"].count("a")) == (engine.stats().num_cached_blocks, 0)
    assert ask(engine, "advice")["num_lookups"] == 3
    assert {"second", "third"} <= {event["name"] for event in ask(engine, "trace")["traceEvents"]}


def test_a_question_that_nobody_answers_is_refused(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidRequestError, match="'weather' and must be one of stats, blocks, explain"):
        engine.inspect_sync("weather")


class OneStepGate(threading.Event):
    """Lets one step through; `stuck` says that the next one waits."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck = threading.Event()
        self._num_passed = 0

    def wait(self, timeout: float | None = None) -> bool:
        self._num_passed += 1
        if self._num_passed == 1:
            return True
        self.stuck.set()
        return super().wait(timeout)


@pytest.mark.asyncio
async def test_an_engine_whose_device_hangs_answers_and_the_event_loop_goes_on() -> None:
    built = make_engine()
    gate = built.runner.gate = OneStepGate()
    stream = aiter(built.engine.generate([1, 2, 3], SamplingParams(max_tokens=200), "stuck"))
    try:
        await anext(stream)
        assert await asyncio.to_thread(gate.stuck.wait, 60.0)
        answers = await asyncio.wait_for(asyncio.gather(*(built.engine.inspect(q) for q in ("stats", "blocks", "requests"))), 60)
        assert [(one["request_id"], one["status"]) for one in answers[2][0]["requests"]] == [("stuck", "running")]
    finally:
        gate.set()
        await built.engine.close()
