"""The caller's trace reaches the engine through every door."""

from __future__ import annotations

import asyncio
import pickle  # noqa: TID251  a request travels between processes so
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bentoml
import httpx
import pytest

from pagedcore.messages import RequestUpdate
from pagedcore.openai import ServerSettings, build_app
from pagedcore_adapters import _litserve_client, bentoml_service
from pagedcore_adapters._litserve_messages import WorkerFacts
from pagedcore_adapters.langchain_chat import ChatPagedCore
from support.fake_engine import make_byte_tokenizer, make_fake_engine
from support.traced import PARENT_ID, TRACE_ID, TRACEPARENT

BODY = {"prompt": "a", "max_tokens": 3}


async def post(app: Any, traceparent: str | None) -> int:
    headers = {} if traceparent is None else {"Traceparent": traceparent}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        return (await client.post("/v1/completions", json=BODY, headers=headers)).status_code


@pytest.mark.asyncio
@pytest.mark.parametrize(("header", "taken"), [(TRACEPARENT, TRACEPARENT), ("00-nonsense-01", None), (None, None)])
async def test_bentoml_hands_on_a_valid_header(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, header: str | None, taken: str | None
) -> None:
    engine, loop = make_fake_engine(tmp_path)
    monkeypatch.setattr(bentoml_service, "shared_engine", lambda config: engine)
    service = bentoml_service.build_service({}, ServerSettings())
    instance = service.inner()
    monkeypatch.setattr(bentoml, "get_current_service", lambda: instance)
    assert await post(service.mount_apps[0][0], header) == 200
    assert [request.traceparent for request in loop.requests] == [taken]
    await instance.close()


class Control:
    """A worker's queue, whose items are pickled as on their way to its process."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.has_item = asyncio.Event()

    def put(self, item: Any) -> None:
        self.items.append(pickle.loads(pickle.dumps(item)))
        self.has_item.set()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        raise AssertionError("an API server never reads a control queue")


@pytest.mark.asyncio
async def test_litserve_hands_it_on_to_the_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = make_byte_tokenizer(tmp_path)
    monkeypatch.setattr(_litserve_client, "load_text", lambda plan: text)
    _, loop = make_fake_engine(tmp_path)
    client, control = _litserve_client.WorkerClient(), Control()
    plan: Any = SimpleNamespace(block_size=16, num_blocks=16)
    client.start(0, [control], {0: WorkerFacts(plan=plan, info=loop.info)})
    reply = asyncio.ensure_future(post(build_app(client, ServerSettings(adapter="litserve")), TRACEPARENT))
    await control.has_item.wait()
    (_, request) = control.items[0]
    assert (request.traceparent, request.adapter) == (TRACEPARENT, "litserve")
    client.receive([RequestUpdate(request.request_id, [65], finish_reason="length", status="completed")])
    assert await reply == 200
    loop.close()


@pytest.mark.parametrize("is_batch", [False, True])
def test_langchain_takes_the_current_span_of_its_caller(tmp_path: Path, is_batch: bool) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    parent = trace.SpanContext(int(TRACE_ID, 16), int(PARENT_ID, 16), is_remote=False, trace_flags=trace.TraceFlags(1))
    engine, loop = make_fake_engine(tmp_path)
    model = ChatPagedCore(engine=engine, max_tokens=3)
    with trace.use_span(trace.NonRecordingSpan(parent)):
        if is_batch:
            model.batch(["one", "two"])
        else:
            model.invoke("one")
    assert {request.traceparent for request in loop.requests} == {TRACEPARENT}
    model.invoke("outside")
    assert loop.requests[-1].traceparent is None
    engine.close_sync()
