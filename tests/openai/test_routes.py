"""What the routes answer, byte for byte where it matters: errors, ids, health, limits, and the raw stream."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pagedcore.client import EngineClient
from pagedcore.errors import ConfigError, EngineClosedError, EngineError
from pagedcore.openai import ServerSettings, add_error_handlers, build_app, build_router
from support.fake_client import FakeClient, Gate, Script
from support.live_server import live_server

RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template")
"""Arguments of a template that a client must not give behind the back of the fields that are checked."""

HI = {"messages": [{"role": "user", "content": "hi"}]}


def connect(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app, raise_app_exceptions=False), base_url="http://test")


async def ask(app: Any, method: str, path: str, **arguments: Any) -> httpx.Response:
    async with connect(app) as client:
        return await client.request(method, path, **arguments)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, whose shape is checked."""
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert isinstance(body["error"]["message"], str)
    assert response.headers["X-Request-Id"]
    return dict(body["error"])


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "words"), [("/v1/embeddings", "makes no embeddings"), ("/v1/responses", "use /v1/chat/completions")])
async def test_a_route_of_openai_that_is_not_offered_says_why(path: str, words: str) -> None:
    response = await ask(build_app(FakeClient()), "POST", path, json={"model": "fake-model", "input": "a"})
    assert response.status_code == 404
    assert error_of(response)["message"].endswith(words + ".")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/v1/cache/explain/abc", 404, "request_not_found"),
        ("GET", "/v1/cache/nothing", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
        ("POST", "/v1/completions/", 404, "unknown_url"),
    ],
)
async def test_unknown_routes_methods_and_models_have_openai_errors(method: str, path: str, status: int, code: str) -> None:
    response = await ask(build_app(FakeClient()), method, path)
    assert response.status_code == status
    assert error_of(response)["code"] == code
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.asyncio
async def test_a_wrong_method_is_told_the_right_one() -> None:
    response = await ask(build_app(FakeClient()), "GET", "/v1/chat/completions")
    assert error_of(response)["message"] == "/v1/chat/completions does not take GET; it takes POST."


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/v1/models/fake-model"])
async def test_balancers_may_ask_for_the_head_of_what_they_look_at(path: str) -> None:
    app = build_app(FakeClient())
    head, get = await ask(app, "HEAD", path), await ask(app, "GET", path)
    assert head.status_code == get.status_code == 200
    assert head.headers["Content-Type"] == get.headers["Content-Type"]
    app.openapi()  # FastAPI warns of what two methods of one route would name alike


@pytest.mark.asyncio
async def test_a_compressed_body_is_refused_by_its_encoding() -> None:
    app = build_app(FakeClient())
    body = gzip.compress(json.dumps(HI).encode())
    packed = await ask(app, "POST", "/v1/chat/completions", content=body, headers={"Content-Encoding": "gzip"})
    plain = await ask(app, "POST", "/v1/chat/completions", json=HI, headers={"Content-Encoding": "identity"})
    assert (packed.status_code, plain.status_code) == (400, 200)
    assert error_of(packed)["message"] == "Content-Encoding 'gzip' is not offered; send plain JSON."
    assert error_of(packed)["param"] == "Content-Encoding"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({**HI, "temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({**HI, "temperature": "hot"}, "temperature", "number"),
        ({**HI, "temperature": 200}, "temperature", "between 0 and 100"),
        ({**HI, "n": True}, "n", "integer"),
        ({**HI, "n": 0}, "n", "between 1 and 128"),
        ({**HI, "stop": [1]}, "stop", "string"),
        ({**HI, "stop": {}}, "stop", "string or a valid list"),
        ({**HI, "stop": ["x"] * 65}, "stop", "at most 64 items long"),
        ({**HI, "stop": "x" * 1025}, "stop", "at most 1024 characters long"),
        ({**HI, "bad_words": ["x"] * 257}, "bad_words", "at most 256 items long"),
        ({**HI, "stop_token_ids": [1] * 4097}, "stop_token_ids", "at most 4096 items long"),
        ({**HI, "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({**HI, "logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias", "at most 4096 items long"),
        ({**HI, "logit_bias": {"7": 1, "8": 101}}, "logit_bias", "token 8 is 101"),
        ({**HI, "top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({**HI, "logprobs": True, "top_logprobs": 65}, "top_logprobs", "top_logprobs is 65 and must be between 0 and 64"),
        ({**HI, "logprobs": True, "top_logprobs": -1}, "top_logprobs", "top_logprobs is -1 and must be between 0 and 64"),
        ({**HI, "max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0 and must be at least 1"),
        ({**HI, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ"),
        ({**HI, "stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({**HI, "stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "is not a field of this request"),
        ({**HI, "stream": True, "stream_options": {"a": 1, "b": 2}}, "stream_options.a", "stream_options.a is not a field"),
        ({**HI, "logit_bias": {"x" * 100: "b"}}, f"logit_bias.{'x' * 64}", "should be a valid number"),
        ({"messages": []}, "messages", "empty"),
        ({}, "messages", "missing"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": ["hi"]}, "messages[0]", "dictionary"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role", "developer"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "string"),
        ({"messages": [{"role": "user", "contents": "hi"}]}, "messages[0].contents", "'content'"),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages", "template refused"),
        ({**HI, "n": 33}, "n", "max_choices is 32; ask for fewer"),
        *[({**HI, "chat_template_kwargs": {name: None}}, "chat_template_kwargs", name) for name in RESERVED],
        ({**HI, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "excludes"),
        ({**HI, "request_id": "ü"}, "request_id", "printable"),
    ],
)
async def test_a_wrong_chat_body_is_a_400_that_names_the_field(body: dict[str, Any], param: str, words: str) -> None:
    fake = FakeClient()
    response = await ask(build_app(fake, ServerSettings(max_choices=32)), "POST", "/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert words in error_of(response)["message"]
    assert fake.seen == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "missing"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": [[]]}, "prompt", "no token"),
        ({"prompt": [-1]}, "prompt", "greater than or equal to 0"),
        ({"prompt": [1, "a"]}, "prompt", "valid"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"prompt": ["a"] * 20, "n": 2}, "prompt", "max_choices is 32; ask for fewer"),
        ({"prompt": "", "add_special_tokens": False}, "prompt", "no token"),
    ],
)
async def test_a_wrong_completion_body_is_a_400_that_names_the_field(body: dict[str, Any], param: str, words: str) -> None:
    response = await ask(build_app(FakeClient(), ServerSettings(max_choices=32)), "POST", "/v1/completions", json=body)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert words in error_of(response)["message"]


REFUSED: list[tuple[str, Any, list[Any]]] = [
    ("functions", [{}], [None, []]),
    ("function_call", {"name": "f"}, [None, "none", "auto"]),
    ("modalities", ["text", "audio"], [None, ["text"]]),
    ("audio", {"voice": "x"}, [None]),
    ("prediction", {"type": "content"}, [None]),
    ("web_search_options", {}, [None]),
    ("service_tier", "flex", [None, "auto", "default"]),
    ("reasoning_effort", "high", [None, "none"]),
    ("verbosity", "low", [None, "medium"]),
    ("store", True, [None, False]),
    ("guided_decoding_backend", "outlines", [None]),
    ("use_beam_search", True, [None, False]),
    ("best_of", 2, [None, 1]),
    ("echo", True, [None, False]),
    ("prompt_cache_retention", "24h", [None, "in_memory"]),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("name", "asked", "neutral"), REFUSED)
async def test_a_field_that_is_not_offered_is_refused_unless_it_asks_for_nothing(name: str, asked: Any, neutral: list[Any]) -> None:
    app = build_app(FakeClient())
    refused = await ask(app, "POST", "/v1/chat/completions", json={**HI, name: asked})
    assert refused.status_code == 400
    assert error_of(refused)["code"] == "unsupported_feature"
    assert error_of(refused)["param"] == name
    for value in neutral:
        assert (await ask(app, "POST", "/v1/chat/completions", json={**HI, name: value})).status_code == 200, value


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "message",
    [
        {"role": "function", "content": "x", "name": "f"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "user", "content": "x", "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "input_audio"}]},
    ],
)
async def test_older_calls_and_pictures_in_messages_are_refused_as_not_offered(message: dict[str, Any]) -> None:
    response = await ask(build_app(FakeClient()), "POST", "/v1/chat/completions", json={"messages": [message]})
    assert response.status_code == 400
    assert error_of(response)["code"] == "unsupported_feature"


@pytest.mark.asyncio
async def test_harmless_metadata_is_taken_and_null_is_the_default_of_every_field() -> None:
    from pagedcore.openai.bodies import ChatBody

    fake = FakeClient()
    harmless = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}, "parallel_tool_calls": False}
    nulls = dict.fromkeys({*ChatBody.model_fields, *ChatBody.not_offered} - {"messages", *harmless})
    response = await ask(build_app(fake), "POST", "/v1/chat/completions", json={**HI, **harmless, **nulls})
    assert response.status_code == 200
    assert fake.seen[0].params.n == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b'"text"', b"[" * 50_000, b'{"prompt": NaN}', b'{"prompt": "\\ud800"}'])
async def test_what_is_not_a_json_object_is_a_400(raw: bytes) -> None:
    response = await ask(build_app(FakeClient()), "POST", "/v1/completions", content=raw)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"


@pytest.mark.asyncio
@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_body_above_the_limit_is_a_413(is_declared: bool) -> None:
    async def parts() -> Any:
        for _ in range(20):
            yield b"x" * 10

    app = build_app(FakeClient(), ServerSettings(max_request_bytes=100))
    response = await ask(app, "POST", "/v1/completions", content=b"x" * 200 if is_declared else parts())
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"
    assert "max_request_bytes" in error_of(response)["message"]


@pytest.mark.asyncio
async def test_the_request_id_of_the_caller_is_used_everywhere_and_returned() -> None:
    fake = FakeClient()
    app = build_app(fake)
    response = await ask(app, "POST", "/v1/chat/completions", json=HI, headers={"X-Request-Id": "mine 1"})
    assert response.headers["X-Request-Id"] == "mine 1"
    assert response.json()["id"] == "chatcmpl-mine 1"
    assert fake.seen[0].request_id == "mine 1"
    for path in ("/health", "/v1/models", "/nowhere", "/metrics"):
        assert (await ask(app, "GET", path, headers={"X-Request-Id": "mine"})).headers["X-Request-Id"] == "mine"
        assert (await ask(app, "GET", path)).headers["X-Request-Id"].startswith("req-")


@pytest.mark.asyncio
async def test_a_body_may_name_the_request_id_unless_the_header_says_another() -> None:
    app = build_app(FakeClient())
    body = {**HI, "request_id": "body-id"}
    assert (await ask(app, "POST", "/v1/chat/completions", json=body)).headers["X-Request-Id"] == "body-id"
    refused = await ask(app, "POST", "/v1/chat/completions", json=body, headers={"X-Request-Id": "other"})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "request_id")


@pytest.mark.asyncio
@pytest.mark.parametrize("value", ["a" * 129, "tab\there", "caf\xe9"])
async def test_a_malformed_request_id_is_a_400_under_a_new_id(value: str) -> None:
    response = await ask(
        build_app(FakeClient()), "POST", "/v1/chat/completions", json=HI, headers={"X-Request-Id": value.encode("latin-1")}
    )  # type: ignore[dict-item]
    assert response.status_code == 400
    assert error_of(response)["param"] == "X-Request-Id"
    assert response.headers["X-Request-Id"].startswith("req-")


@pytest.mark.asyncio
async def test_an_id_that_is_in_flight_is_refused_and_free_again_afterwards() -> None:
    gate = Gate()
    fake = FakeClient(Script(gates={0: gate}))
    async with connect(build_app(fake)) as client:
        headers = {"X-Request-Id": "same"}
        first = asyncio.ensure_future(client.post("/v1/chat/completions", json=HI, headers=headers))
        await asyncio.to_thread(fake.wait_for_request)
        second = await client.post("/v1/chat/completions", json=HI, headers=headers)
        assert (second.status_code, error_of(second)["param"]) == (400, "request_id")
        gate.open()
        assert (await first).status_code == 200
        assert (await client.post("/v1/chat/completions", json=HI, headers=headers)).status_code == 200


@pytest.mark.asyncio
async def test_health_and_ready_answer_503_with_retry_after_when_they_are_not() -> None:
    fake = FakeClient()
    app = build_app(fake, ServerSettings(api_keys=("key",), retry_after_s=7))
    assert (await ask(app, "GET", "/health")).json() == {"status": "ok"}
    assert (await ask(app, "GET", "/ready")).json() == {"status": "ready"}
    assert (await ask(app, "GET", "/metrics")).text == "pagedcore_fake 1.0\n"
    fake.ready = fake.alive = False
    for path in ("/health", "/ready"):
        response = await ask(app, "GET", path)
        assert (response.status_code, response.headers["Retry-After"]) == (503, "7")
        assert error_of(response)["type"] == "server_error"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/fake-model", "/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"]
)
async def test_every_other_route_needs_the_key(path: str) -> None:
    app = build_app(FakeClient(), ServerSettings(api_keys=("key",)))
    method = "GET" if "models" in path else "POST"
    bodies = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": HI, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [97]}}
    arguments: dict[str, Any] = {"json": bodies[path]} if path in bodies else {}
    for authorization in ({}, {"Authorization": "Basic key"}, {"Authorization": "Bearer no"}):
        refused = await ask(app, method, path, headers=authorization, **arguments)
        assert (refused.status_code, error_of(refused)["type"]) == (401, "authentication_error")
        assert refused.headers["WWW-Authenticate"] == "Bearer"
    assert (await ask(app, method, path, headers={"Authorization": "Bearer key"}, **arguments)).status_code == 200


@pytest.mark.asyncio
async def test_a_key_may_be_any_text() -> None:
    app = build_app(FakeClient(), ServerSettings(api_keys=("schlüssel",)))
    for key, status in (("schlüssel", 200), ("schl\xfcssel".encode("latin-1"), 401)):
        raw = key.encode() if isinstance(key, str) else key
        assert (await ask(app, "GET", "/v1/models", headers={b"Authorization": b"Bearer " + raw})).status_code == status


@pytest.mark.asyncio
async def test_metrics_can_be_left_to_the_host() -> None:
    response = await ask(build_app(FakeClient(), ServerSettings(allow_operator_routes=False)), "GET", "/metrics")
    assert response.status_code == 404


@pytest.mark.asyncio
async def test_tokenize_and_detokenize_are_inverse_and_know_chats() -> None:
    app = build_app(FakeClient())
    tokens = (await ask(app, "POST", "/tokenize", json={"prompt": "né"})).json()
    assert tokens == {"count": 4, "max_model_len": 4096, "tokens": [256, 110, 195, 169]}
    assert (await ask(app, "POST", "/detokenize", json={"tokens": tokens["tokens"][1:]})).json() == {"prompt": "né"}
    chat = (await ask(app, "POST", "/tokenize", json={**HI, "add_generation_prompt": False})).json()
    assert bytes(chat["tokens"]) == b"<user>hi"
    both = await ask(app, "POST", "/tokenize", json={**HI, "prompt": "a"})
    assert (both.status_code, error_of(both)["param"]) == (400, "prompt")


@pytest.mark.asyncio
async def test_without_a_tokenizer_token_ids_work_and_text_is_refused_with_the_reason() -> None:
    fake = FakeClient(Script(pieces=("ab",)))
    fake.text = None
    app = build_app(fake)
    refused = await ask(app, "POST", "/v1/chat/completions", json=HI)
    assert (refused.status_code, "skip_tokenizer_init" in error_of(refused)["message"]) == (400, True)
    reply = await ask(app, "POST", "/v1/completions", json={"prompt": [1, 2], "logprobs": 0})
    assert reply.json()["choices"][0]["logprobs"]["tokens"] == ["token_id:97", "token_id:98"]


@pytest.mark.asyncio
async def test_the_raw_stream_is_server_sent_events_that_end_with_done() -> None:
    response = await ask(build_app(FakeClient(Script(pieces=("é",)))), "POST", "/v1/completions", json={"prompt": "a", "stream": True})
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert "Content-Length" not in response.headers
    events = response.content.split(b"\n\n")
    assert events[1:] == [b"data: [DONE]", b""]
    assert json.loads(events[0].removeprefix(b"data: "))["choices"][0]["text"] == "é"


@pytest.mark.asyncio
async def test_an_error_in_mid_stream_is_an_error_event_and_no_done() -> None:
    script = Script(pieces=("a", "b"), error=EngineClosedError("The engine is closing."), error_step=1)
    response = await ask(build_app(FakeClient(script)), "POST", "/v1/completions", json={"prompt": "a", "stream": True})
    events = response.text.split("\n\n")
    assert [event.split("\n")[0].split(":")[0] for event in events] == ["data", "event", ""]
    assert events[1].startswith('event: error\ndata: {"error":{"message":"The engine is closing."')


@pytest.mark.asyncio
async def test_a_failure_in_mid_stream_is_in_the_log_under_the_requests_id(caplog: pytest.LogCaptureFixture) -> None:
    script = Script(pieces=("a", "b"), error=EngineError("The step failed."), error_step=1)
    body = {"prompt": "a", "stream": True, "user": "u" * 10_000}
    with caplog.at_level("INFO"):
        await ask(build_app(FakeClient(script)), "POST", "/v1/completions", json=body, headers={"X-Request-Id": "mine"})
    first, last = (record.getMessage() for record in caplog.records if record.name == "pagedcore.openai")
    assert first.startswith("request mine: model 'fake-model'")
    assert len(first) < 300
    assert last == "request mine: its stream ended with an error: The step failed."


@pytest.mark.asyncio
async def test_a_request_aborted_by_the_host_ends_with_that_reason() -> None:
    fake = FakeClient(Script(gates={1: Gate()}))
    async with connect(build_app(fake)) as client:
        call = asyncio.ensure_future(client.post("/v1/chat/completions", json=HI, headers={"X-Request-Id": "a"}))
        await asyncio.to_thread(fake.wait_for_request)
        await fake.abort("a")
        choice = (await call).json()["choices"][0]
    assert choice["finish_reason"] == "abort"


@pytest.mark.asyncio
async def test_an_engine_that_ends_without_a_finish_reason_is_an_error_not_a_short_answer() -> None:
    class Quitter(FakeClient):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            async for output in super().generate(*args, **kwargs):
                yield output
                return

    response = await ask(build_app(Quitter()), "POST", "/v1/chat/completions", json=HI)
    assert (response.status_code, error_of(response)["code"]) == (500, "engine_error")


@pytest.mark.asyncio
async def test_a_failure_that_nobody_foresaw_is_an_openai_500() -> None:
    class Broken(FakeClient):
        async def is_alive(self) -> bool:
            raise KeyError("oops")

    response = await ask(build_app(Broken()), "GET", "/health", headers={"X-Request-Id": "bad"})
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert response.headers["X-Request-Id"] == "bad"
    assert "oops" not in response.text


@pytest.mark.asyncio
async def test_the_router_serves_an_engine_that_the_host_creates_later() -> None:
    made: list[EngineClient] = []

    def current() -> EngineClient:
        if not made:
            raise EngineClosedError("The engine is not there yet.")
        return made[0]

    host = FastAPI()
    host.include_router(build_router(current, ServerSettings(adapter="bentoml")), prefix="/llm")
    add_error_handlers(host)
    assert (await ask(host, "GET", "/llm/health")).status_code == 503
    fake = FakeClient()
    made.append(fake)
    assert (await ask(host, "POST", "/llm/v1/chat/completions", json=HI)).status_code == 200
    assert fake.seen[0].context.adapter == "bentoml"
    assert error_of(await ask(host, "GET", "/nowhere"))["code"] == "unknown_url"


@pytest.mark.serve
def test_health_answers_at_once_while_a_large_prompt_is_tokenized() -> None:
    fake = FakeClient()
    fake.fake_text.encode_gate = threading.Event()
    with live_server(build_app(fake)) as url, httpx.Client(base_url=url, timeout=30) as client:
        body = {"prompt": "a" * 5_000_000}
        large = threading.Thread(target=lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=60))
        large.start()
        assert fake.fake_text.encode_started.wait(60)
        assert client.get("/health").status_code == 200
        assert not fake.seen, "the prompt is still being tokenized"
        fake.fake_text.encode_gate.set()
        fake.wait_for_request()
        large.join(60)
    assert len(fake.seen[0].prompt_token_ids) == 5_000_001


@pytest.mark.parametrize(
    "settings",
    [
        {"max_request_bytes": 0},
        {"max_choices": -1},
        {"retry_after_s": 0},
        {"api_keys": "secret"},
        {"api_keys": ("",)},
        {"tenants": {"": "a"}},
    ],
)
def test_a_wrong_setting_is_a_config_error(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ServerSettings(**settings)
