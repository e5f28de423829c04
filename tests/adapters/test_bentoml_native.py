"""The typed API of the BentoML service through BentoML's own clients: replies, streams, errors, keys, and clients that leave."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bentoml
import httpx
import pytest
from bentoml.exceptions import BentoMLException, InvalidArgument, ServiceUnavailable
from pydantic import ValidationError

from pagedcore import QueueFullError, SamplingParams, StepFailedError
from pagedcore.messages import RequestUpdate
from pagedcore_adapters._bentoml_bodies import NOT_ANSWERED, ChatBody, GenerateBody
from support.bentoml_served import client_of, served, service_on_fake_engine, warning_of_bentoml
from support.fake_engine import ANSWER, FakeLoop
from support.served import post_and_leave

pytestmark = warning_of_bentoml

KEY = "a-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
MESSAGES = [{"role": "user", "content": "hi"}]
PATHS = ("/generate", "/generate_stream", "/chat", "/chat_stream")
ENDLESS = 10**9

of_each_path = pytest.mark.parametrize("path", PATHS)


@dataclasses.dataclass
class Door:
    url: str
    loop: FakeLoop

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body_of(path, **options), headers=HEADERS, timeout=60)


def body_of(path: str, **options: Any) -> dict[str, Any]:
    return {**({"messages": MESSAGES} if "chat" in path else {"prompt": "hi"}), **options}


def error_of(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status
    body = reply.json()
    assert (list(body), list(body["error"])) == (["error"], ["message", "type", "param", "code"])
    return dict(body["error"])


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Door]:
    service, loop = service_on_fake_engine(monkeypatch, tmp_path, api_keys=(KEY,))
    with served(service) as url:
        yield Door(url, loop)


def test_the_synchronous_client_gets_replies_and_streams(door: Door) -> None:
    with client_of(door.url, token=KEY) as client:
        reply = client.generate(prompt="hi!", max_tokens=5)
        assert reply.pop("request_id") == door.loop.requests[0].request_id
        assert reply == {
            "text": ANSWER[:5],
            "finish_reason": "length",
            "num_prompt_tokens": 3,
            "num_cached_tokens": 2,
            "num_output_tokens": 5,
        }
        assert client.chat(messages=MESSAGES, max_tokens=4)["text"] == ANSWER[:4]
        assert "".join(client.generate_stream(prompt="hi", max_tokens=20)) == ANSWER[:20]
        assert "".join(client.chat_stream(messages=MESSAGES, max_tokens=20)) == ANSWER[:20]
    assert {request.adapter for request in door.loop.requests} == {"bentoml"}


@pytest.mark.asyncio
async def test_the_asynchronous_client_gets_replies_and_streams(door: Door) -> None:
    async with bentoml.AsyncHTTPClient(door.url, token=KEY) as client:
        assert (await client.generate(prompt="hi", max_tokens=5))["text"] == ANSWER[:5]
        pieces = [piece async for piece in client.chat_stream(messages=MESSAGES, max_tokens=300)]
        client._temp_dir.cleanup()
    assert len(pieces) > 3
    assert "".join(pieces) == (ANSWER * 10)[:300]


def test_a_chat_is_rendered_by_the_template_and_a_prompt_is_not(door: Door) -> None:
    door.post("/chat", max_tokens=1)
    door.post("/generate", max_tokens=1)
    prompts = [door.loop.text.decode(list(request.prompt_token_ids)) for request in door.loop.requests]
    assert prompts == ["user: hi\nassistant: ", "hi"]


def test_a_developer_is_what_templates_call_system(door: Door) -> None:
    door.post("/chat", messages=[{"role": "developer", "content": "Be brief."}, *MESSAGES], max_tokens=1)
    assert door.loop.text.decode(list(door.loop.requests[0].prompt_token_ids)) == "system: Be brief.\nuser: hi\nassistant: "


def test_sampling_parameters_arrive_as_the_client_wrote_them(door: Door) -> None:
    asked: dict[str, Any] = {
        "max_tokens": 3,
        "temperature": 0.5,
        "seed": 7,
        "stop": "capital",
        "bad_words": ["no", "never"],
        "stop_token_ids": [9],
        "logit_bias": {"5": 1.5},
    }
    with client_of(door.url, token=KEY) as client:
        assert "capital" not in client.generate(prompt="hi", **{**asked, "max_tokens": 30})["text"]
        client.generate(prompt="hi", **asked)
    expected = SamplingParams(**{**asked, "logit_bias": {5: 1.5}})
    assert door.loop.requests[1].params == expected


def test_each_sampling_parameter_is_taken_but_those_that_a_reply_cannot_answer() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)} - set(NOT_ANSWERED)
    assert set(GenerateBody.model_fields) == names | {"prompt"}
    assert set(ChatBody.model_fields) == names | {"messages"}
    assert SamplingParams(**GenerateBody(prompt="x").model_dump(exclude={"prompt"})) == SamplingParams()
    assert all(field.description for name, field in GenerateBody.model_fields.items() if name in names)


# ---- what is refused


WRONG_BODIES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"tempo": 1}, "tempo", "unknown_field", r"tempo is not a field of this request; did you mean 'temperature'\?"),
    ({"max_token": 1}, "max_token", "unknown_field", r"max_token is not a field of this request; did you mean 'max_tokens'\?"),
    ({"zzz": 1}, "zzz", "unknown_field", "zzz is not a field of this request; leave it out."),
    ({"n": 2}, "n", "unsupported_feature", "n is not offered here; /v1/completions offers what OpenAI's API has."),
    ({"max_tokens": "many"}, "max_tokens", "invalid_value", "max_tokens is wrong: it should be a valid integer, .*, got 'many'."),
    ({"stop_token_ids": [1, "x"]}, "stop_token_ids[1]", "invalid_value", r"stop_token_ids\[1\] is wrong: .* got 'x'."),
    ({"temperature": -1}, "temperature", "invalid_value", "temperature is -1.0 and must be between 0 and 100."),
]


@of_each_path
@pytest.mark.parametrize(("fields", "param", "code", "message"), WRONG_BODIES)
def test_what_is_wrong_with_a_body_is_an_error_of_openais_shape(
    door: Door, path: str, fields: dict[str, Any], param: str, code: str, message: str
) -> None:
    error = error_of(door.post(path, **fields), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert re.fullmatch(message, error["message"])
    assert door.loop.requests == []


@of_each_path
def test_a_body_without_its_first_field_is_refused_by_name(door: Door, path: str) -> None:
    first = next(iter(body_of(path)))
    for body in ({}, {first: None}):
        reply = httpx.post(door.url + path, json=body, headers=HEADERS, timeout=60)
        assert error_of(reply, 400) == {
            "message": f"{first} is missing; this request needs it.",
            "type": "invalid_request_error",
            "param": first,
            "code": "missing_field",
        }


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({**MESSAGES[0], "name": "me"}, "messages[0].name", "messages[0].name is not a field of this request"),
        ({"role": "user"}, "messages[0].content", "messages[0].content is missing"),
        (
            {"role": "king", "content": "hi"},
            "messages[0].role",
            "it should be 'system', 'developer', 'user', 'assistant' or 'tool', got 'king'",
        ),
        ("hi", "messages[0]", "messages[0] is wrong"),
    ],
)
def test_what_is_wrong_with_a_message_is_refused_by_its_place(door: Door, message: Any, param: str, words: str) -> None:
    error = error_of(door.post("/chat", messages=[message]), 400)
    assert error["param"] == param
    assert words in error["message"]


@of_each_path
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"prompt"', b"\xff"])
def test_what_is_no_json_object_is_refused(door: Door, path: str, raw: bytes) -> None:
    reply = httpx.post(door.url + path, content=raw, headers={**HEADERS, "Content-Type": "application/json"}, timeout=60)
    assert error_of(reply, 400)["code"] == "invalid_json"


@of_each_path
def test_what_a_page_may_send_without_asking_is_refused_and_what_curl_sends_is_read(door: Door, path: str) -> None:
    def post(content_type: str, **headers: str) -> httpx.Response:
        sent = {**HEADERS, "Content-Type": content_type, **headers}
        return httpx.post(door.url + path, content=json.dumps(body_of(path, max_tokens=1)), headers=sent, timeout=60)

    form = "application/x-www-form-urlencoded"
    assert post(form).status_code == 200
    for reply in (post(form, Origin="http://page.example"), post("text/plain"), post("multipart/form-data; boundary=x")):
        assert error_of(reply, 415)["code"] == "unsupported_media_type"


def test_a_body_above_the_limit_is_a_413(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    service, loop = service_on_fake_engine(monkeypatch, tmp_path, settings={"max_request_bytes": 100})
    with served(service) as url:
        reply = httpx.post(url + "/generate", json={"prompt": "x" * 100}, timeout=60)
    assert error_of(reply, 413)["code"] == "request_too_large"
    assert loop.requests == []


@of_each_path
def test_pages_of_the_list_may_call_and_read_why_it_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str) -> None:
    page = "https://page.example"
    service, _ = service_on_fake_engine(monkeypatch, tmp_path, api_keys=(KEY,), settings={"cors_origins": (page,)})
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with served(service) as url:
        answers = {
            "native": httpx.options(url + path, headers={"Origin": page, **asked}),
            "OpenAI's": httpx.options(url + "/v1/completions", headers={"Origin": page, **asked}),
        }
        assert [(reply.status_code, reply.headers["Access-Control-Allow-Headers"]) for reply in answers.values()] == [
            (204, "authorization")
        ] * 2
        assert httpx.options(url + path, headers={"Origin": "https://other.example", **asked}).json()["error"]["code"] == "unknown_origin"
        answers |= {
            "right": httpx.post(url + path, json=body_of(path, max_tokens=1), headers={**HEADERS, "Origin": page}),
            "wrong": httpx.post(url + path, json={}, headers={**HEADERS, "Origin": page}),
            "no key": httpx.post(url + path, json={}, headers={"Origin": page}),
            "no route": httpx.get(url + "/nope", headers={"Origin": page}),
            "OpenAI's route": httpx.get(url + "/v1/models", headers={"Origin": page}),
        }
    allowed = {name: reply.headers.get_list("Access-Control-Allow-Origin") for name, reply in answers.items()}
    assert allowed == {name: [page] for name in answers}


def test_no_page_may_call_by_default(door: Door) -> None:
    assert httpx.options(door.url + "/generate", headers={"Origin": "http://page.example"}).status_code == 405
    reply = httpx.post(door.url + "/generate", json={"prompt": "hi"}, headers={**HEADERS, "Origin": "http://page.example"}, timeout=60)
    assert (reply.status_code, reply.headers.get("Access-Control-Allow-Origin")) == (200, None)


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/v1/embeddings", 404, "There is no route POST /v1/embeddings: the model generates text and makes no embeddings."),
        ("GET", "/nope", 404, "There is no route GET /nope."),
        ("GET", "/generate", 405, "/generate does not take GET; it takes POST."),
        ("GET", "/v1/completions", 405, "/v1/completions does not take GET; it takes POST."),
    ],
)
def test_what_no_route_takes_is_an_error_of_openais_shape(door: Door, method: str, path: str, status: int, message: str) -> None:
    reply = httpx.request(method, door.url + path, timeout=30)
    assert reply.status_code == status
    assert reply.json()["error"]["message"] == message
    assert reply.headers["X-Request-Id"]


def test_bentomls_client_raises_the_sentence(door: Door) -> None:
    with client_of(door.url, token=KEY) as client:
        with pytest.raises(InvalidArgument, match=r"temperature is -1\.0 and must be between 0 and 100"):
            client.generate(prompt="hi", temperature=-1)
        with pytest.raises(InvalidArgument, match=r"temperature is -1\.0"):
            list(client.generate_stream(prompt="hi", temperature=-1))
        with pytest.raises(TypeError, match="tempo"):
            client.generate(prompt="hi", tempo=1)


@of_each_path
def test_without_the_key_nobody_is_answered(door: Door, path: str) -> None:
    reply = httpx.post(door.url + path, json=body_of(path), timeout=60)
    assert (reply.status_code, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert door.loop.requests == []


@of_each_path
def test_a_full_queue_is_429_with_retry_after(door: Door, path: str) -> None:
    refuse_all(door.loop, QueueFullError("The queue is full.", retry_after_s=2.5))
    reply = door.post(path)
    assert (reply.status_code, reply.headers["Retry-After"]) == (429, "3")
    assert reply.json()["error"] == {"message": "The queue is full.", "type": "rate_limit_error", "param": None, "code": "queue_full"}


def test_a_draining_engine_is_503_ready_says_so_and_bentomls_client_raises(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(door.url, token=KEY) as client:
        assert httpx.get(door.url + "/readyz").status_code == 200
        monkeypatch.setattr(door.loop, "is_closed", True)
        assert [httpx.get(door.url + path).status_code for path in ("/readyz", "/livez", "/ready", "/health")] == [503] * 4
        with pytest.raises(ServiceUnavailable, match="The engine is closed"):
            client.generate(prompt="hi")
        monkeypatch.undo()


def refuse_all(loop: FakeLoop, error: BaseException) -> None:
    """Answer each request with `error` instead of running it."""

    def submit(message: Any, outbox: Any = None) -> None:
        if outbox is not None:
            outbox([RequestUpdate(request_id=message.request_id, new_token_ids=[], finish_reason="error", status="rejected", error=error)])  # type: ignore[arg-type]

    loop.submit = submit  # type: ignore[method-assign]


# ---- what ends early


@pytest.mark.parametrize("path", ["/generate_stream", "/chat_stream"])
def test_a_client_that_leaves_a_stream_ends_the_request(door: Door, path: str) -> None:
    with httpx.stream("POST", door.url + path, json=body_of(path, max_tokens=ENDLESS), headers=HEADERS, timeout=60) as reply:
        next(reply.iter_bytes())
        (request,) = door.loop.requests
    assert door.loop.wait_until(lambda: door.loop.aborted == [request.request_id])


@pytest.mark.parametrize("path", ["/generate", "/chat"])
def test_a_client_that_stops_waiting_for_a_reply_ends_the_request(door: Door, path: str) -> None:
    post_and_leave(door.url + path, body_of(path, max_tokens=ENDLESS), lambda: door.loop.requests, HEADERS)
    assert door.loop.wait_until(lambda: len(door.loop.aborted) == 1)


def end_of_stream(door: Door, path: str, act: Callable[[], None]) -> None:
    """Read a stream's beginning, then act, then read the rest."""
    body = body_of(path, max_tokens=ENDLESS)
    with httpx.stream("POST", door.url + path, json=body, headers=HEADERS, timeout=60) as reply:
        pieces = reply.iter_bytes()
        next(pieces)
        act()
        list(pieces)


@pytest.mark.parametrize("path", ["/generate_stream", "/chat_stream"])
def test_a_stream_that_fails_midway_breaks_and_does_not_look_whole(door: Door, path: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        end_of_stream(door, path, lambda: fail_all(door.loop))


def test_a_stream_whose_request_is_aborted_breaks_too(door: Door) -> None:
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        end_of_stream(door, "/generate_stream", door.loop.close)


def fail_all(loop: FakeLoop) -> None:
    with loop._changed:
        for request_id in list(loop._running):
            loop._end(request_id, finish_reason="error", status="error", error=StepFailedError("The step failed."))


def test_a_failed_reply_is_500_with_the_sentence(door: Door) -> None:
    refuse_all(door.loop, StepFailedError("The step failed."))
    with client_of(door.url, token=KEY) as client, pytest.raises(BentoMLException) as raised:
        client.generate(prompt="hi")
    assert json.loads(str(raised.value))["error"]["message"] == "The step failed."


def test_a_message_has_one_of_the_roles_that_there_are() -> None:
    with pytest.raises(ValidationError, match="role"):
        ChatBody(messages=[{"role": "x", "content": "hi"}])
