"""Where prompts are read: long ones in a worker thread, so that the event loop goes on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from pagedcore.openai import ServerSettings, build_app
from support.fake_client import FakeClient, FakeText

INLINE_BYTES = ServerSettings().inline_request_bytes
SHORT, LONG = "a" * 100, "a" * (INLINE_BYTES + 1)


class WatchedText(FakeText):
    """Notes the thread of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True, max_prompt_tokens: int | None = None) -> list[int]:
        self.threads["encode"] = threading.get_ident()
        return super().encode(text, add_special_tokens=add_special_tokens, max_prompt_tokens=max_prompt_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.threads["decode"] = threading.get_ident()
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[dict[str, Any]], **template_kwargs: Any) -> str:
        self.threads["render"] = threading.get_ident()
        return super().render_chat(messages, **template_kwargs)


async def threads_of(path: str, body: dict[str, Any]) -> dict[str, int]:
    """Thread of each call of the tokenizer, on the way of one request."""
    fake = FakeClient()
    fake.text = text = WatchedText()
    transport = httpx.ASGITransport(app=build_app(fake))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.post(path, json=body)).status_code == 200
    return text.threads


CALLS = [
    ("/v1/completions", lambda text: {"prompt": text}, {"encode"}),
    ("/v1/completions", lambda text: {"prompt": [1] * (len(text) // 2), "echo": True, "max_tokens": 1}, {"decode"}),
    ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}, {"render", "encode"}),
    ("/tokenize", lambda text: {"messages": [{"role": "user", "content": text}]}, {"render", "encode"}),
    ("/detokenize", lambda text: {"tokens": [97] * (len(text) // 2)}, {"decode"}),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body_of", "expected"), CALLS)
async def test_a_long_prompt_is_rendered_and_tokenized_in_another_thread(path: str, body_of: Any, expected: set[str]) -> None:
    body = body_of(LONG)
    assert len(json.dumps(body)) > INLINE_BYTES
    threads = await threads_of(path, body)
    assert expected <= set(threads)
    assert threading.get_ident() not in [threads[name] for name in expected]


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body_of", "expected"), CALLS)
async def test_a_short_one_takes_no_detour(path: str, body_of: Any, expected: set[str]) -> None:
    threads = await threads_of(path, body_of(SHORT))
    assert {threads[name] for name in expected} == {threading.get_ident()}


@pytest.mark.asyncio
async def test_the_event_loop_goes_on_while_a_chat_of_5_mb_is_tokenized() -> None:
    fake = FakeClient()
    fake.fake_text.encode_gate = threading.Event()
    transport = httpx.ASGITransport(app=build_app(fake))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = {"messages": [{"role": "user", "content": "a" * 5_000_000}]}
        large = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
        assert await asyncio.to_thread(fake.fake_text.encode_started.wait, 20)
        small = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        assert small.status_code == 200
        assert not large.done()
        fake.fake_text.encode_gate.set()
        assert (await large).status_code == 200
