"""A caller's trace goes on in the engine's spans, whichever adapter the request came through."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("bentoml")
pytest.importorskip("langchain_core")

import bentoml
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from pagedcore.async_engine import AsyncEngine
from pagedcore.client import ModelInfo
from pagedcore.core.scheduler import Scheduler
from pagedcore.engine_build import recorder_info, scheduler_limits
from pagedcore.engine_loop import EngineLoop, EngineParts
from pagedcore.observe.recorder import Recorder
from pagedcore.openai import ServerSettings, build_app
from pagedcore_adapters import bentoml_service
from pagedcore_adapters.langchain_chat import ChatPagedCore
from support.engine_builder import make_plan
from support.fake_engine import make_byte_tokenizer
from support.fake_runner import FakeRunner
from support.traced import PARENT_ID, TRACE_ID, TRACEPARENT


def make_engine(folder: Path) -> AsyncEngine:
    """Real scheduler, recorder and tracer over a fake model whose tokens are bytes."""
    text = make_byte_tokenizer(folder)
    plan = dataclasses.replace(make_plan(), vocab_size=text.vocab_size)
    info = ModelInfo(model_names=("fake",), max_model_len=plan.max_model_len, created_s=0, vocab_size=text.vocab_size)
    recorder = Recorder(recorder_info(plan), registry=CollectorRegistry())
    runner = FakeRunner(plan.num_blocks, plan.block_size)
    scheduler = Scheduler(scheduler_limits(plan))
    return AsyncEngine(loop=EngineLoop(EngineParts(plan=plan, info=info, scheduler=scheduler, runner=runner, recorder=recorder)), text=text)


async def post(app: Any) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        body = {"model": "fake", "prompt": "Who?", "max_tokens": 3}
        reply = await client.post("/v1/completions", json=body, headers={"Traceparent": TRACEPARENT})
    assert reply.status_code == 200, reply.text


def ask(door: str, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    if door == "litserve":
        asyncio.run(post(build_app(engine, ServerSettings(adapter="litserve"))))
    elif door == "bentoml":
        monkeypatch.setattr(bentoml_service, "shared_engine", lambda _: engine)
        service = bentoml_service.build_service({}, ServerSettings())
        instance = service.inner()
        monkeypatch.setattr(bentoml, "get_current_service", lambda: instance)
        asyncio.run(post(service.mount_apps[0][0]))
    else:
        parent = trace.SpanContext(int(TRACE_ID, 16), int(PARENT_ID, 16), is_remote=False, trace_flags=trace.TraceFlags(1))
        with trace.use_span(trace.NonRecordingSpan(parent)):
            ChatPagedCore(engine=engine, max_tokens=3).invoke("Who?")


def spans_of(door: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[ReadableSpan]:
    """All spans of one request through a door."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    engine = make_engine(folder)
    ask(door, engine, monkeypatch)
    engine.close_sync()
    return list(exporter.get_finished_spans())


@pytest.mark.parametrize("door", ["litserve", "bentoml", "langchain"])
def test_the_span_of_a_request_is_a_child_of_its_callers(door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = spans_of(door, tmp_path, monkeypatch)
    (root,) = [span for span in spans if span.name == "text_completion fake"]
    assert root.parent is not None
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    facts = dict(root.attributes or {})
    assert (facts["pagedcore.adapter"], facts["gen_ai.usage.output_tokens"], facts["pagedcore.status"]) == (door, 3, "completed")
    phases = [span.name for span in spans if span.parent is not None and span.parent.span_id == root.context.span_id]
    assert phases == ["queue", "prefill", "decode"]
