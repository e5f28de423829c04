"""Whatever a client sends: never a 500, and every refusal has an OpenAI body."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedcore.http import json_text
from pagedcore.openai import build_app
from pagedcore.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from support.fake_client import FakeClient, Script

ROUTES = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody, "/tokenize": TokenizeBody, "/detokenize": DetokenizeBody}

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.integers(0, 5)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=8
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": st.text(max_size=5) | anything}),
    max_size=3,
)
prompts = st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=3) | st.lists(st.integers(-1, 300), max_size=4)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    route = draw(st.sampled_from(sorted(ROUTES)))
    names = sorted({*ROUTES[route].model_fields, *ROUTES[route].not_offered})
    body = draw(st.dictionaries(st.sampled_from(names) | st.text(max_size=5), anything, max_size=4))
    if draw(st.integers(0, 4)):
        body |= {"messages": draw(messages)} if route == "/v1/chat/completions" else {"prompt": draw(prompts)}
    if draw(st.booleans()):
        body.pop("model", None)
    return route, body


FAKE = FakeClient(Script(pieces=("a", "é")))
APP = build_app(FAKE)


async def send(route: str, raw: bytes) -> httpx.Response:
    FAKE.seen.clear()
    transport = httpx.ASGITransport(app=APP, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post(route, content=raw)
    assert FAKE.num_open == 0
    return response


def check(response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert len(error["message"]) < 1000
    elif response.headers["Content-Type"].startswith("text/event-stream"):
        assert response.content.endswith(b"data: [DONE]\n\n")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests())
def test_a_random_body_is_answered_or_refused_in_openai_form(request: tuple[str, dict[str, Any]]) -> None:
    route, body = request
    check(asyncio.run(send(route, json.dumps(body).encode())))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(ROUTES)), st.binary(max_size=40))
def test_random_bytes_are_refused_in_openai_form(route: str, raw: bytes) -> None:
    check(asyncio.run(send(route, raw)))


@pytest.mark.parametrize("depth", [500, 900, 990, 1000, 1020, 5000])
@pytest.mark.parametrize("field", ["stop", "metadata", "response_format", "logit_bias", "prompt", "chat_template_kwargs"])
def test_deep_nesting_is_refused_not_a_crash(depth: int, field: str) -> None:
    raw = b'{"prompt": "a", "%s": %s}' % (field.encode(), b"[" * depth + b"]" * depth)
    check(asyncio.run(send("/v1/completions", raw)))


@pytest.mark.parametrize("raw", [b'{"prompt": "\\ud83d"}', b'{"prompt": "a", "metadata": {"\\udc00": 1}}', b'{"prompt": Infinity}', b"{"])
def test_what_is_no_json_is_refused(raw: bytes) -> None:
    response = asyncio.run(send("/v1/completions", raw))
    check(response)
    assert response.status_code == 400


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("é \U0001f600\u2028\n\0", '"é \U0001f600\u2028\\n\\u0000"'),
        ({"numbers": [1, -0.25, None, True], "nested": {"a": []}}, '{"numbers":[1,-0.25,null,true],"nested":{"a":[]}}'),
        ([float("inf"), float("nan")], "[null,null]"),
    ],
)
def test_json_is_compact_utf_8(value: object, written: str) -> None:
    assert json_text.dumps(value) == written.encode()


def test_a_million_wrong_items_cost_one_error() -> None:
    raw = json.dumps({"prompt": [1.5] * 1_000_000}).encode()
    response = asyncio.run(send("/v1/completions", raw))
    check(response)
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("bias", [{"x" * 1_000_000: 1}, {f"x{i}": 1 for i in range(4000)}, {str(i): 1000 for i in range(4000)}])
def test_a_huge_logit_bias_that_is_wrong_gives_a_short_error(bias: dict[str, float]) -> None:
    response = asyncio.run(send("/v1/completions", json.dumps({"prompt": "a", "logit_bias": bias}).encode()))
    check(response)
    assert response.status_code == 400


def test_a_huge_field_name_is_cut_in_the_refusal() -> None:
    check(asyncio.run(send("/v1/completions", json.dumps({"prompt": "a", "x" * 1_000_000: 1}).encode())))
