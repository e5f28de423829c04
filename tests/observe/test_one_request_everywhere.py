"""One id, wherever a request is told of: header, body, log, trace file, explanation, list, history, and its spans."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from pagedcore.async_engine import AsyncEngine
from pagedcore.client import ModelInfo
from pagedcore.core.scheduler import Scheduler
from pagedcore.engine_build import recorder_info, scheduler_limits
from pagedcore.engine_loop import EngineLoop, EngineParts
from pagedcore.observe.recorder import Recorder
from pagedcore.openai import ServerSettings, build_app
from pagedcore.tracing.tracer import Tracer
from support.engine_builder import make_plan
from support.fake_runner import FakeRunner
from support.traced import PARENT_ID, TRACE_ID, TRACEPARENT

REQUEST_ID = "my-own/id 7"
BODY = {"model": "fake", "prompt": list(range(20)), "max_tokens": 3}


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in log.read_text(encoding="utf-8").splitlines()]


def make_logging_engine(log: Path) -> AsyncEngine:
    """Real scheduler, recorder and tracer over a fake model."""
    plan = make_plan(request_log=str(log))
    info = ModelInfo(model_names=("fake",), max_model_len=plan.max_model_len, created_s=0, vocab_size=plan.vocab_size)
    recorder = Recorder(recorder_info(plan), registry=CollectorRegistry())
    parts = EngineParts(
        plan=plan, info=info, scheduler=Scheduler(scheduler_limits(plan)), runner=FakeRunner(plan.num_blocks, plan.block_size),
        recorder=recorder, tracer=Tracer(recorder, plan.config),
    )  # fmt: skip
    return AsyncEngine(loop=EngineLoop(parts))


async def ask(app: Any, log: Path, engine: AsyncEngine) -> dict[str, Any]:
    """What each place says of a request that was sent under an id and in a trace."""
    headers = {"X-Request-Id": REQUEST_ID, "Traceparent": TRACEPARENT}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        reply = await client.post("/v1/completions", json=BODY, headers=headers)
        assert reply.status_code == 200, reply.text
        explained = (await client.get(f"/v1/cache/explain/{REQUEST_ID}")).json()
        listed = (await client.get("/v1/requests")).json()["data"]
        trace = (await client.get("/v1/trace")).json()
    await engine.close()
    (line,) = await asyncio.to_thread(lines_of, log)
    tracks = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name" and event["pid"] == 2]
    return {
        "header": reply.headers["X-Request-Id"],
        "body": reply.json()["id"],
        "explain": explained["request_id"],
        "list": [one["request_id"] for one in listed],
        "trace file": tracks,
        "log": line["request_id"],
        "trace ids": {line["trace_id"], listed[0]["trace_id"]},
    }


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An in-memory exporter behind the provider of the process."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def test_a_request_has_one_id_in_header_body_log_trace_explanation_and_spans(tmp_path: Path, spans: Any) -> None:
    engine = make_logging_engine(tmp_path / "log")
    found = asyncio.run(ask(build_app(engine, ServerSettings(adapter="litserve")), tmp_path / "log", engine))
    assert found == {
        "header": REQUEST_ID,
        "body": f"cmpl-{REQUEST_ID}",
        "explain": REQUEST_ID,
        "list": [REQUEST_ID],
        "trace file": [REQUEST_ID],
        "log": REQUEST_ID,
        "trace ids": {TRACE_ID},
    }
    (root,) = [span for span in spans.get_finished_spans() if span.name == "text_completion fake"]
    assert (root.attributes["gen_ai.response.id"], root.attributes["pagedcore.request_id"]) == (REQUEST_ID, REQUEST_ID)
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    children = [span.name for span in spans.get_finished_spans() if span.parent is not None and span.parent.span_id == root.context.span_id]
    assert children == ["queue", "prefill", "decode"]
