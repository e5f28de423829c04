"""An HTTP router and a LangChain chat on one engine that runs at a socket: one pool, one book, and who asked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from langchain_core.messages import HumanMessage

from pagedcore import AsyncEngine
from pagedcore.openai import ServerSettings, build_app
from pagedcore.remote.address import SocketPath
from pagedcore.remote.server import EngineServer
from pagedcore_adapters.langchain_chat import ChatPagedCore
from support.engine_builder import make_plan
from support.fake_engine import ANSWER, FakeLoop, make_byte_tokenizer
from support.remote_engines import short_folder


@pytest.fixture
def doors(tmp_path: Path) -> Iterator[tuple[FakeLoop, AsyncEngine, AsyncEngine]]:
    """An engine whose answers are text, and two fronts of it."""
    loop = FakeLoop(make_byte_tokenizer(tmp_path))
    plan = make_plan(skip_tokenizer_init=False, max_model_len=100_000)
    loop.plan = dataclasses.replace(plan, tokenizer_dir=str(tmp_path), vocab_size=256)  # type: ignore[assignment]
    engine = AsyncEngine(loop=loop, text=loop.text)  # type: ignore[arg-type]
    with short_folder() as folder:
        server = EngineServer(engine, SocketPath(folder / "engine.sock"))
        fronts = [AsyncEngine.connect(folder / "engine.sock") for _ in range(2)]
        try:
            yield loop, fronts[0], fronts[1]
        finally:
            for front in fronts:
                front.close_sync()
            engine.close_sync()
            server.close()


def test_http_and_langchain_share_an_engine_through_a_socket(doors: tuple[FakeLoop, AsyncEngine, AsyncEngine]) -> None:
    loop, http, chain = doors
    client = TestClient(build_app(http, ServerSettings(api_keys=("k",), adapter="library")))
    body = {"messages": [{"role": "user", "content": "Where is Paris?"}], "max_tokens": 8}
    headers = {"Authorization": "Bearer k", "X-Request-Id": "mine"}
    reply = client.post("/v1/chat/completions", json=body, headers=headers).json()
    assert reply["choices"][0]["message"]["content"] == ANSWER[:8]
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}, headers=headers) as stream:
        *events, done = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events) == ANSWER[:8]
    assert done == "[DONE]"
    message = ChatPagedCore(engine=chain, max_tokens=5).invoke([HumanMessage("Hi")])
    assert message.content == ANSWER[:5]
    assert message.usage_metadata["input_token_details"]["cache_read"] == 4
    assert [request.adapter for request in loop.requests] == ["library", "library", "langchain"]
    assert client.get("/ready").status_code == client.get("/health").status_code == 200
    assert client.get("/metrics").text.startswith("#")
    assert client.get("/v1/models", headers=headers).json()["data"][0]["id"] == "fake"


def test_a_bad_request_is_refused_in_the_front(doors: tuple[FakeLoop, AsyncEngine, AsyncEngine]) -> None:
    loop, http, _ = doors
    client = TestClient(build_app(http))
    reply = client.post("/v1/completions", json={"prompt": "Hi", "temperature": -1})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "temperature"
    assert not loop.requests


def test_a_stop_string_that_a_front_finds_ends_the_request_in_the_engine(doors: tuple[FakeLoop, AsyncEngine, AsyncEngine]) -> None:
    loop, http, _ = doors
    client = TestClient(build_app(http))
    reply = client.post("/v1/completions", json={"prompt": "Hi", "stop": " of", "max_tokens": 100_000 - 10})
    choice = reply.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("The capital", "stop")
    assert loop.wait_until(lambda: loop.num_running == 0)
    assert not loop.aborted


def test_the_door_says_503_while_the_engine_is_away(doors: tuple[FakeLoop, AsyncEngine, AsyncEngine]) -> None:
    _, http, _ = doors
    client = TestClient(build_app(http))
    http.loop._link.abort()  # type: ignore[attr-defined]
    http.loop._source._path = Path("/nowhere/engine.sock")  # type: ignore[attr-defined]
    while client.get("/ready").status_code == 200:
        pass
    ready, answer = client.get("/ready"), client.post("/v1/completions", json={"prompt": "Hi"})
    assert (ready.status_code, answer.status_code) == (503, 503)
    assert {"Retry-After", "retry-after"} & {*answer.headers}
    assert client.get("/health").status_code == 200
    assert client.get("/metrics").status_code == 503
