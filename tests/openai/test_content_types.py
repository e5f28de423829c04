"""What a body may call itself: JSON, or what programs send that say nothing of it; and never what a page may send without asking."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import httpx
import pytest

from pagedcore.openai import build_app
from support.fake_client import FakeClient
from support.live_server import live_server

RAW = b'{"messages": [{"role": "user", "content": "hi"}]}'
PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
FORM = "application/x-www-form-urlencoded"


async def post(path: str, content_type: str | None, raw: bytes = RAW, **headers: str) -> tuple[httpx.Response, FakeClient]:
    fake = FakeClient()
    transport = httpx.ASGITransport(app=build_app(fake))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        sent = {**headers, **({} if content_type is None else {"Content-Type": content_type})}
        return await client.post(path, content=raw, headers=sent), fake


@pytest.mark.asyncio
@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
@pytest.mark.parametrize("headers", [{}, {"Origin": "http://page.example"}], ids=["program", "page"])
async def test_json_is_taken_from_programs_and_from_pages(content_type: str, headers: dict[str, str]) -> None:
    reply, fake = await post("/v1/chat/completions", content_type, **headers)
    assert reply.status_code == 200
    assert len(fake.seen) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("content_type", [None, "", FORM])
async def test_a_program_may_leave_the_type_out_or_send_curls(content_type: str | None) -> None:
    assert (await post("/v1/chat/completions", content_type))[0].status_code == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("origin", ["http://page.example", "null"])
@pytest.mark.parametrize("content_type", [None, FORM])
@pytest.mark.parametrize("path", PATHS)
async def test_a_page_must_say_that_its_body_is_json(path: str, content_type: str | None, origin: str) -> None:
    """A browser sends these without asking the server first, with any text as their body."""
    reply, fake = await post(path, content_type, Origin=origin)
    assert reply.status_code == 415
    error = reply.json()["error"]
    assert error["message"] == f"A web page, of {origin!r}, must say that the body is JSON; add Content-Type: application/json."
    assert (error["param"], error["code"], error["type"]) == ("Content-Type", "unsupported_media_type", "invalid_request_error")
    assert fake.seen == []


@pytest.mark.asyncio
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("content_type", "shown"),
    [
        ("text/plain;charset=UTF-8", "text/plain"),
        ("multipart/form-data; boundary=x", "multipart/form-data"),
        ("application/xml", "application/xml"),
        ("application/jsonl", "application/jsonl"),
        ("application/json, text/plain", "application/json, text/plain"),
    ],
)
async def test_what_says_that_it_is_something_else_is_a_415_that_says_what_to_send(path: str, content_type: str, shown: str) -> None:
    reply, fake = await post(path, content_type)
    assert reply.status_code == 415
    message = f"Content-Type {shown!r} is not JSON; send the body as JSON, with Content-Type: application/json."
    assert reply.json()["error"]["message"] == message
    assert fake.seen == []


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(
    ("more", "status"), [((), "200"), (("-H", "Content-Type: text/plain"), "415"), (("-H", "Origin: http://x"), "415")]
)
def test_curl_with_d_alone_is_answered(more: tuple[str, ...], status: str) -> None:
    with live_server(build_app(FakeClient())) as url:
        command: list[Any] = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-d", RAW, *more, url + "/v1/chat/completions"]
        assert subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.decode() == status
