"""The small way in: `PagedCoreAPI` in somebody's own LitServer, with their own decode_request and encode_response."""

from __future__ import annotations

import inspect
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import HTTPException, Request
from pydantic import BaseModel

from pagedcore import ConfigError, EngineConfig, SamplingParams
from pagedcore_adapters import _litserve_plain_api
from pagedcore_adapters.litserve_api import PagedCoreAPI
from support.fake_engine import ANSWER, make_fake_engine
from support.repository import ROOT
from support.served import Served, free_port, serve, wait_until


@pytest.fixture(autouse=True)
def no_metrics_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_litserve_plain_api, "ensure_multiprocess_dir", lambda: "")


def serve_custom(kind: str, tmp_path: Path) -> AbstractContextManager[Served]:
    port = free_port()
    script = str(ROOT / "tests" / "support" / "litserve_custom_app.py")
    return serve([script, str(port), kind], tmp_path / "server.log", port=port, ready_path="/health")


def make_api(tmp_path: Path, **options: Any) -> PagedCoreAPI:
    """As it is in a worker."""
    api = PagedCoreAPI(EngineConfig(), **options)
    api.engine, _ = make_fake_engine(tmp_path)
    return api


# ---- in a worker


@pytest.mark.asyncio
async def test_a_body_becomes_a_prompt_and_its_sampling_parameters(tmp_path: Path) -> None:
    api = make_api(tmp_path)
    body: Any = {"prompt": "hi", "max_tokens": 3, "temperature": 0.5}
    assert await api.decode_request(body) == ("hi", SamplingParams(max_tokens=3, temperature=0.5))
    chat: Any = {"messages": [{"role": "user", "content": "hi"}]}
    prompt, params = await api.decode_request(chat)
    assert api.engine.text is not None
    assert api.engine.text.decode(prompt) == "user: hi\nassistant: "
    assert params == SamplingParams()
    parts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    prompt = api.chat_prompt([{"role": "developer", "content": parts}, *chat["messages"]])
    assert api.engine.text.decode(prompt) == "system: Be brief.\nBe kind.\nuser: hi\nassistant: "
    api.engine.close_sync()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "either prompt or messages"),
        ({"prompt": "a", "messages": []}, "either prompt or messages"),
        ([], "either prompt or messages"),
        ({"prompt": "a", "max_tokns": 3}, "no parameter 'max_tokns'"),
        ({"prompt": "a", "n": 2}, "no parameter 'n'"),
        ({"messages": 5}, "a list of objects"),
        ({"messages": []}, "a list of objects"),
        ({"messages": ["hi"]}, "a list of objects"),
        ({"messages": [{"role": "bob", "content": "hi"}]}, "messages[0].role is 'bob'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is None"),
        ({"messages": [{"role": "user", "content": "hi", "text": "hi"}]}, "messages[0].text is not a field"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
    ],
)
async def test_a_body_that_is_wrong_is_a_400_with_the_reason(tmp_path: Path, body: Any, message: str) -> None:
    api = make_api(tmp_path)
    with pytest.raises(HTTPException) as caught:
        await api.decode_request(body)
    assert caught.value.status_code == 400
    assert message in caught.value.detail["message"]  # type: ignore[index]
    api.engine.close_sync()


@pytest.mark.asyncio
async def test_predict_takes_a_prompt_in_any_form_and_gives_the_last_output(tmp_path: Path) -> None:
    api = make_api(tmp_path)
    for prompt in ("hi", [1, 2], {"prompt_token_ids": [1, 2]}):
        output: Any = await api.predict((prompt, SamplingParams(max_tokens=5)))
        assert (output.finished, output.outputs[0].text) == (True, ANSWER[:5])
        assert (await api.encode_response(output)) == {
            "text": ANSWER[:5],
            "finish_reason": "length",
            "num_prompt_tokens": 2,
            "num_cached_tokens": 1,
            "num_output_tokens": 5,
        }
    assert (await api.predict("hi")).outputs[0].text == ANSWER[:16]
    api.engine.close_sync()


@pytest.mark.asyncio
async def test_what_the_engine_refuses_is_an_http_error_and_in_a_stream_a_last_object(tmp_path: Path) -> None:
    api = make_api(tmp_path)
    with pytest.raises(HTTPException) as caught:
        await api.predict([10**6])
    assert caught.value.status_code == 400
    pieces = api.encode_stream(api.predict_stream([10**6]))
    assert [piece async for piece in pieces] == [{"error": caught.value.detail}]
    api.engine.close_sync()


@pytest.mark.asyncio
async def test_leaving_a_stream_early_aborts_it(tmp_path: Path) -> None:
    api = PagedCoreAPI(EngineConfig(), stream=True)
    api.engine, loop = make_fake_engine(tmp_path)
    pieces: Any = api.encode_response(api.predict(("hi", SamplingParams(max_tokens=10**9))))
    await anext(pieces)
    await pieces.aclose()
    assert loop.wait_until(lambda: len(loop.aborted) == 1)
    api.engine.close_sync()


class Body(BaseModel):
    text: str


class Typed(PagedCoreAPI):
    async def decode_request(self, request: Body, **unused: Any) -> str:
        return request.text

    async def encode_response(self, output: Any, **unused: Any) -> dict[str, Any]:
        return {}


def test_what_a_subclass_says_of_streams_stands(tmp_path: Path) -> None:
    api = Typed(EngineConfig(), stream=True)
    assert inspect.isasyncgenfunction(api.predict)
    assert api.encode_response.__func__ is Typed.encode_response  # type: ignore[attr-defined]
    assert not inspect.isasyncgenfunction(Typed(EngineConfig()).predict)


def test_annotations_written_as_text_are_what_they_name_when_litserve_reads_them() -> None:
    assert inspect.signature(Typed.decode_request).parameters["request"].annotation is Body
    assert inspect.signature(Typed.encode_response).return_annotation == dict[str, Any]
    assert inspect.signature(PagedCoreAPI.decode_request).parameters["request"].annotation is Request


def test_litserves_own_batching_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_batch_size is 8, and the engine batches by itself"):
        PagedCoreAPI(EngineConfig(), max_batch_size=8)


# ---- served by a stock LitServer


@pytest.mark.serve
def test_the_example_cleans_its_input_and_its_requests_run_in_one_batch(tmp_path: Path) -> None:
    with serve_custom("example", tmp_path) as served, ThreadPoolExecutor(4) as pool:

        def ask(number: int) -> httpx.Response:
            return httpx.post(served.url + "/summarize", json={"html": f"<p>ticket&nbsp;{number}</p>\n<br>"}, timeout=60)

        replies = [reply.json() for reply in pool.map(ask, range(4))]  # the engine makes no step before all four run
        assert replies == [{"summary": (ANSWER * 2)[:40].strip(), "num_cached_tokens": 4}] * 4
        assert httpx.post(served.url + "/summarize", json={"text": "x"}, timeout=60).status_code == 422
        assert served.get("/metrics").status_code == 200


@pytest.mark.serve
@pytest.mark.parametrize(
    ("kind", "number", "is_group", "later_s"),
    [
        ("example", signal.SIGTERM, False, 0.0),
        ("whole", signal.SIGTERM, True, 0.0),
        ("whole", signal.SIGTERM, True, 0.05),
        ("whole", signal.SIGINT, True, 0.0),
    ],
    ids=["SIGTERM to the main process", "SIGTERM to all", "SIGTERM to all, to the main process last", "Ctrl-C in a terminal"],
)
def test_a_signal_ends_all_its_processes_without_a_traceback(
    tmp_path: Path, kind: str, number: signal.Signals, is_group: bool, later_s: float
) -> None:
    with serve_custom(kind, tmp_path) as served:
        main = served.process.pid
        for pid in served.pids().keys() - {main} if is_group else ():
            os.kill(pid, number)
        time.sleep(later_s)
        os.kill(main, number)
        assert served.process.wait(60) == 0
        wait_until(lambda: not served.pids(), 30, "the end of all processes")
        assert "Traceback" not in served.tail()
        assert "Application shutdown complete" in served.tail()


@pytest.mark.serve
def test_the_default_forms_answer_whole_and_refuse_with_a_reason(tmp_path: Path) -> None:
    with serve_custom("whole", tmp_path) as served:
        reply = httpx.post(served.url + "/predict", json={"prompt": "hi", "max_tokens": 6}, timeout=60)
        assert (reply.status_code, reply.json()["text"]) == (200, ANSWER[:6])
        reply = httpx.post(served.url + "/predict", json={"prompt": "hi", "max_tokens": -6}, timeout=60)
        assert (reply.status_code, reply.json()["detail"]["param"]) == (400, "max_tokens")


@pytest.mark.serve
def test_the_default_forms_stream_piece_by_piece(tmp_path: Path) -> None:
    with serve_custom("stream", tmp_path) as served:
        body = {"prompt": "hi", "max_tokens": 1000}
        with httpx.stream("POST", served.url + "/predict", json=body, timeout=60) as reply:
            pieces = [json.loads(line) for line in reply.iter_lines()]
        assert "".join(piece["text"] for piece in pieces) == (ANSWER * 40)[:1000]
        assert len(pieces) > 3
        assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == ["length"]
        with httpx.stream("POST", served.url + "/predict", json={"prompt": [10**6]}, timeout=60) as reply:
            (error,) = [json.loads(line) for line in reply.iter_lines()]
        assert error["error"]["param"] == "prompt"


@pytest.mark.model
@pytest.mark.serve
@pytest.mark.slow
def test_the_example_summarizes_with_the_embedded_model_and_finds_its_instructions_cached(tmp_path: Path) -> None:
    port = free_port()
    with serve(
        [str(ROOT / "examples" / "litserve_custom.py"), str(port)], tmp_path / "server.log", port=port, ready_path="/health"
    ) as served:
        ticket = {"html": "<p>My card was <b>stolen</b>, please block it.</p>"}
        first, second = (httpx.post(served.url + "/summarize", json=ticket, timeout=120).json() for _ in range(2))
        assert "card" in first["summary"].lower()
        assert second["summary"] == first["summary"]
        assert (first["num_cached_tokens"], second["num_cached_tokens"]) == (0, 32)
        assert 'pagedcore_requests_total{adapter="litserve"' in served.get("/metrics").text
