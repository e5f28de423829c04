"""OpenTelemetry spans: under the caller's span, with the names of the GenAI conventions, at the right times, and over the wire."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from pagedcore.config import EngineConfig
from pagedcore.core.events import Arrived
from pagedcore.errors import MissingExtraError
from pagedcore.extras import pip_command
from pagedcore.tracing.otlp import otlp_provider, traces_url
from pagedcore.tracing.spans import Spans
from pagedcore.tracing.tracer import Tracer
from support.observed import make_add, make_finished
from support.traced import PARENT_ID, TRACE_ID, TRACEPARENT, TracedEngine, live_through_a_preemption, preempted_life, preempted_request

TO_UNIX_S = 1_700_000_000.0
"""What the wall clock of these tests shows beyond the monotonic one."""


class Collected:
    """A provider whose spans are kept."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def spans_of(self, *lives: Any) -> list[ReadableSpan]:
        Spans("m", self.provider, clock=lambda: 0.0, wall=lambda: TO_UNIX_S).take(lives)
        return list(self.exporter.get_finished_spans())


def root_of(spans: list[ReadableSpan]) -> ReadableSpan:
    (root,) = [span for span in spans if span.name.startswith("text_completion")]
    return root


def unix_ns(at_s: float) -> int:
    return int((at_s + TO_UNIX_S) * 1e9)


def test_the_span_of_a_request_is_a_child_of_its_callers() -> None:
    root = root_of(Collected().spans_of(preempted_life(traceparent=TRACEPARENT)))
    assert root.parent is not None
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}", root.parent.is_remote) == (TRACE_ID, PARENT_ID, True)


def test_phases_are_children_at_their_times() -> None:
    spans = Collected().spans_of(preempted_life(traceparent=TRACEPARENT))
    root = root_of(spans)
    assert (root.start_time, root.end_time) == (unix_ns(1000.0), unix_ns(1002.6))
    children = [span for span in spans if span is not root]
    assert all(child.parent is not None and child.parent.span_id == root.context.span_id for child in children)
    assert [(child.name, child.start_time, child.end_time) for child in children] == [
        ("queue", unix_ns(1000.0), unix_ns(1001.4)),
        ("prefill", unix_ns(1001.4), unix_ns(1001.5)),
        ("decode", unix_ns(1001.5), unix_ns(1001.6)),
        ("preempted", unix_ns(1001.6), unix_ns(1002.0)),
        ("decode", unix_ns(1002.0), unix_ns(1002.6)),
    ]


def test_events_tell_of_preemptions() -> None:
    events = {event.name: event for event in root_of(Collected().spans_of(preempted_life())).events}
    assert set(events) == {"passed_over", "prefill_chunk", "first_token", "preempted", "resumed"}
    preempted = events["preempted"]
    assert preempted.timestamp == unix_ns(1001.6)
    assert dict(preempted.attributes or {}) == {"num_lost_tokens": 13, "usage_before": 0.9, "usage_after": 0.5}


def test_names_are_those_of_the_genai_conventions() -> None:
    conventions = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    root = root_of(Collected().spans_of(preempted_life()))
    attributes = dict(root.attributes or {})
    known = {value for name, value in vars(conventions).items() if name.startswith("GEN_AI_") and isinstance(value, str)}
    assert {name for name in attributes if name.startswith("gen_ai.")} <= known
    assert attributes["gen_ai.operation.name"] in {value.value for value in conventions.GenAiOperationNameValues}
    assert root.name == "text_completion m"
    expected = {
        conventions.GEN_AI_REQUEST_MODEL: "m",
        conventions.GEN_AI_USAGE_INPUT_TOKENS: 13,
        conventions.GEN_AI_USAGE_OUTPUT_TOKENS: 5,
        conventions.GEN_AI_RESPONSE_FINISH_REASONS: ("stop",),
        conventions.GEN_AI_RESPONSE_ID: "r",
        "gen_ai.usage.cache_read.input_tokens": 4,
        "pagedcore.tenant": "acme",
        "pagedcore.preemptions": 1,
        "pagedcore.waiting_ms.blocks": 900.0,
    }
    assert {name: attributes[name] for name in expected} == expected
    assert root.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("status", "reject_reason", "code", "error_type"),
    [
        ("rejected", "too_long", StatusCode.ERROR, "too_long"),
        ("error", None, StatusCode.ERROR, "engine_error"),
        ("aborted", None, StatusCode.UNSET, None),
    ],
)
def test_failures_are_errors_and_a_caller_who_left_is_none(
    status: str, reject_reason: str | None, code: StatusCode, error_type: str | None
) -> None:
    engine = TracedEngine()
    request = make_add("r")
    engine.at(1001.0, Arrived(request, 1000.0), make_finished(request, 1001.0, status, reject_reason=reject_reason))
    root = root_of(Collected().spans_of(*engine.history.lives()))
    assert (root.status.status_code, (root.attributes or {}).get("error.type")) == (code, error_type)


def test_the_prompt_of_several_choices_counts_once() -> None:
    collected = Collected()
    lives = [preempted_life(group="g", choice_index=index, num_choices=2) for index in range(2)]
    roots = [span for span in collected.spans_of(*lives) if span.name.startswith("text_completion")]
    assert [(root.attributes or {}).get("gen_ai.usage.input_tokens") for root in roots] == [13, None]


def test_a_caller_who_does_not_record_its_trace_has_no_spans() -> None:
    assert Collected().spans_of(preempted_life(traceparent=TRACEPARENT[:-2] + "00")) == []


def test_a_request_without_a_trace_begins_one_that_the_record_names() -> None:
    life = preempted_life()
    root = root_of(Collected().spans_of(life))
    assert root.parent is None
    assert life.trace_id == f"{root.context.trace_id:032x}"


def test_a_span_that_happens_to_be_current_in_the_writers_thread_is_no_parent() -> None:
    collected = Collected()
    with trace.use_span(collected.provider.get_tracer("other").start_span("other")):
        assert root_of(collected.spans_of(preempted_life())).parent is None


class FailingProcessor(SpanProcessor):
    """The host's code, which does not know what to make of one request."""

    def on_end(self, span: ReadableSpan) -> None:
        if (span.attributes or {}).get("gen_ai.response.id") == "odd":
            raise ValueError("an odd span")


def test_one_span_that_the_hosts_code_does_not_take_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    collected = Collected()
    collected.provider.add_span_processor(FailingProcessor())
    spans = collected.spans_of(*(preempted_life(name=name) for name in ("first", "odd", "last")))
    roots = {str((span.attributes or {})["gen_ai.response.id"]) for span in spans if span.name.startswith("text_completion")}
    assert roots == {"first", "odd", "last"}
    assert caplog.text.count("an odd span") >= 1


def test_spans_go_to_the_provider_of_the_process_from_when_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, collected = TracedEngine(), Collected()
    live_through_a_preemption(engine, preempted_request("before"))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: collected.provider)
    live_through_a_preemption(engine, preempted_request("after"))
    engine.tracer.close()
    root = root_of(list(collected.exporter.get_finished_spans()))
    assert (root.attributes or {})["pagedcore.request_id"] == "after"
    collected.provider.get_tracer("host").start_span("still open").end()
    assert collected.exporter.get_finished_spans()[-1].name == "still open"


def test_without_a_provider_nothing_is_made_and_nothing_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Spans("m").has_provider
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    spans = Spans("m")
    spans.take([preempted_life()])
    assert not spans.has_provider
    assert "opentelemetry.trace" not in sys.modules


class Collector(BaseHTTPRequestHandler):
    """Speaks OTLP over HTTP: takes what is posted."""

    posts: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        self.posts.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Tests are quiet."""


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    posts: list[tuple[str, bytes]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Collector,), {"posts": posts}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", posts
    server.shutdown()
    server.server_close()
    thread.join()


def test_spans_reach_a_collector_over_otlp(collector: tuple[str, list[tuple[str, bytes]]]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    address, posts = collector
    engine = TracedEngine(engine="worker-1")
    tracer = Tracer(engine.recorder, EngineConfig(otlp_endpoint=address), clock=engine.clock)
    live_through_a_preemption(engine, preempted_request(traceparent=TRACEPARENT))
    tracer.close()
    assert [path for path, _ in posts] == ["/v1/traces"]
    (resource_spans,) = ExportTraceServiceRequest.FromString(posts[0][1]).resource_spans
    resource = {attribute.key: attribute.value.string_value for attribute in resource_spans.resource.attributes}
    assert (resource["service.name"], resource["service.instance.id"]) == ("pagedcore", "worker-1")
    spans = [span for scope in resource_spans.scope_spans for span in scope.spans]
    assert sorted(span.name for span in spans) == ["decode", "decode", "preempted", "prefill", "queue", "text_completion m"]
    (root,) = [span for span in spans if span.name == "text_completion m"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert root.end_time_unix_nano - root.start_time_unix_nano == pytest.approx(2_600_000_000, abs=1000)
    values = {attribute.key: attribute.value for attribute in root.attributes}
    assert values["gen_ai.usage.output_tokens"].int_value == 5


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://otel.example/v1/traces", "https://otel.example/v1/traces"),
        ("https://otel.example/custom", "https://otel.example/custom"),
    ],
)
def test_the_address_of_a_collector_stands_for_its_traces(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingExtraError, match=re.escape(pip_command("otel"))):
        otlp_provider("http://localhost:4318", "0")
