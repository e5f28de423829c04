"""An engine's own history, trace file and log, and how the caller's trace gets to it from a library call."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedcore.client import RequestContext
from pagedcore.errors import InvalidRequestError
from pagedcore.outputs import RequestOutput, RequestTimings
from pagedcore.sampling_params import SamplingParams
from pagedcore.traceparent import TraceParent, parse_traceparent
from support.engine_builder import Built, make_engine
from support.trace_format import check_trace
from support.traced import PARENT_ID, TRACE_ID, TRACEPARENT

PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


@pytest.fixture
def built() -> Iterator[Built]:
    built = make_engine()
    yield built
    built.engine.close_sync()


def run(built: Built, name: str, num_tokens: int = 20, context: RequestContext | None = None, params: SamplingParams = PARAMS) -> None:
    for _ in built.engine.generate_sync([token % 41 for token in range(num_tokens)], params, name, context=context):
        pass
    built.settle()


def test_the_history_of_an_engine_knows_its_requests_and_not_its_warm_up(built: Built) -> None:
    run(built, "a")
    run(built, "b", context=RequestContext(request_class="chat"))
    assert [record["request_id"] for record in built.engine.history.recent()] == ["b", "a"]
    record = built.engine.history.find("b")
    assert record is not None
    assert (record["status"], record["finish_reason"], record["completion_tokens"]) == ("completed", "length", 5)
    assert record["cached_tokens"] == {"live": 0, "pool": 16, "host": 0}
    assert 0 <= record["time_in_queue_ms"] <= record["ttft_ms"] <= record["e2e_ms"]
    assert sum(record["waiting_reason_ms"].values()) == pytest.approx(record["time_in_queue_ms"], abs=0.01)


def test_a_request_of_300_tokens_that_shares_nothing_holds_its_pages() -> None:
    built = make_engine(block_size=16, max_model_len=512)
    run(built, "r", num_tokens=300, params=SamplingParams(max_tokens=1, ignore_eos=True))
    record = built.engine.history.find("r")
    assert record is not None
    assert (record["kv_cache_pages_allocated"], record["kv_cache_pages_new"]) == (19, 19)
    built.engine.close_sync()


def test_trace_writes_a_file_that_viewers_read(built: Built, tmp_path: Path) -> None:
    run(built, "a", params=SamplingParams(n=2, max_tokens=5, ignore_eos=True))
    built.engine.trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_trace(trace)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert names == {"steps", "a", "a#1"}
    steps = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
    assert sum(step["args"]["num_tokens"] for step in steps) >= 20 + 2 * 4


def test_history_outlives_the_engine_and_open_requests_end_in_it(tmp_path: Path) -> None:
    built = make_engine(gate_open=False)
    stream = built.engine.front.open(built.engine.front.tokenize([1, 2, 3]), PARAMS, "open", context=None, arrival_s=0.0, waker=_NoWaker())
    built.runner.waiting.wait(60.0)
    built.runner.gate.set()
    built.engine.close_sync()
    record = built.engine.history.find("open")
    assert record is not None
    assert record["events"][-1]["name"] == "finished"
    assert stream.request_id == "open"


def test_transport_time_is_what_the_caller_waited_beyond_the_engines_time(built: Built) -> None:
    started_s = time.monotonic()
    outputs = list(built.engine.generate_sync([1, 2, 3], PARAMS))
    wall_s = time.monotonic() - started_s
    assert all(output.transport_s is None for output in outputs[:-1])
    last = outputs[-1]
    assert last.timings is not None
    assert last.timings.finished_s is not None
    assert last.timings.queued_s is not None
    assert last.transport_s is not None
    assert last.timings.arrival_s <= last.timings.queued_s <= (last.timings.admitted_s or 0.0)
    assert 0.0 < last.transport_s <= wall_s - (last.timings.finished_s - last.timings.queued_s)


def test_several_choices_have_one_transport_time(built: Built) -> None:
    last = list(built.engine.generate_sync([1, 2, 3], SamplingParams(n=2, max_tokens=5, ignore_eos=True)))[-1]
    assert last.transport_s is not None
    assert last.transport_s > 0.0


def test_an_engine_that_closes_hands_on_what_ended_last(monkeypatch: pytest.MonkeyPatch) -> None:
    built = make_engine()
    ended_at_close: list[str] = []
    monkeypatch.setattr(built.loop.tracer, "close", lambda: ended_at_close.extend(r["status"] for r in built.engine.history.recent()))
    run(built, "a")
    built.engine.close_sync()
    assert ended_at_close == ["completed"]


def test_transport_time_is_client_time_minus_engine_time() -> None:
    timings = RequestTimings(arrival_s=10.0, admitted_s=11.5, first_token_s=12.0, finished_s=15.0, queued_s=11.0)
    output = RequestOutput("r", None, [], [], timings=timings, delivered_s=15.25)
    assert output.transport_s == (15.25 - 10.0) - (15.0 - 11.0)
    assert RequestOutput("r", None, [], [], delivered_s=15.25).transport_s is None


class _NoWaker:
    key = object()

    def wake(self, streams: object) -> bool:
        return True


def test_the_callers_trace_is_in_the_history(built: Built) -> None:
    run(built, "a", context=RequestContext(traceparent=TRACEPARENT))
    run(built, "b")
    assert [record["trace_id"] for record in built.engine.history.recent()] == [None, TRACE_ID]


def test_the_current_span_of_the_calling_thread_is_the_parent(built: Built) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    parent = trace.SpanContext(int(TRACE_ID, 16), int(PARENT_ID, 16), is_remote=False, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(parent)):
        run(built, "ambient")
        run(built, "explicit", context=RequestContext(traceparent=TRACEPARENT.replace("0af7", "1af7")))
    (explicit, ambient) = reversed(built.engine.history.lives()[-2:])
    assert ambient.parent == TraceParent(TRACE_ID, PARENT_ID, 1)
    assert explicit.parent is not None
    assert explicit.parent.trace_id == TRACE_ID.replace("0af7", "1af7")


@pytest.mark.asyncio
async def test_the_current_span_of_the_calling_task_is_the_parent(built: Built) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    parent = trace.SpanContext(int(TRACE_ID, 16), int(PARENT_ID, 16), is_remote=False, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(parent)):
        async for _ in built.engine.generate([1, 2, 3], PARAMS):
            pass
    assert built.engine.history.recent(1)[0]["trace_id"] == TRACE_ID


@pytest.mark.parametrize(
    ("text", "parent"),
    [
        (TRACEPARENT, TraceParent(TRACE_ID, PARENT_ID, 1)),
        (TRACEPARENT[:-2] + "00", TraceParent(TRACE_ID, PARENT_ID, 0)),
        ("cc" + TRACEPARENT[2:] + "-what-comes-later", TraceParent(TRACE_ID, PARENT_ID, 1)),
        (TRACEPARENT + "-more", None),
        ("ff" + TRACEPARENT[2:], None),
        (TRACEPARENT.upper(), None),
        (f"00-{'0' * 32}-{PARENT_ID}-01", None),
        (f"00-{TRACE_ID}-{'0' * 16}-01", None),
        (TRACEPARENT + "\n", None),
        ("", None),
    ],
)
def test_a_traceparent_is_read_as_its_standard_says(text: str, parent: TraceParent | None) -> None:
    assert parse_traceparent(text) == parent


@pytest.mark.parametrize("wrong", ["garbage", "", 7])
def test_a_library_caller_is_told_of_a_wrong_traceparent_and_a_header_is_ignored(wrong: object) -> None:
    with pytest.raises(InvalidRequestError, match="W3C traceparent") as raised:
        RequestContext(traceparent=wrong)  # type: ignore[arg-type]
    assert raised.value.param == "traceparent"
    if isinstance(wrong, str):
        assert RequestContext().in_trace(wrong).traceparent is None
    assert RequestContext(tenant="t").in_trace(None) == RequestContext(tenant="t")
    assert RequestContext(tenant="t").in_trace(TRACEPARENT) == RequestContext(tenant="t", traceparent=TRACEPARENT)
