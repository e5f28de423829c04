"""Request ids of callers on the real front: whatever they look like, no two open requests get mixed up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from pagedcore.openai import build_app
from support.fake_engine import ANSWER, make_fake_engine


@pytest.mark.asyncio
async def test_an_id_that_looks_like_a_choice_of_another_request_is_refused_only_while_that_is_open(tmp_path: Path) -> None:
    engine, loop = make_fake_engine(tmp_path, gather=3)  # nothing moves before a third choice joins the first two
    transport = httpx.ASGITransport(app=build_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def ask(request_id: str, n: int) -> httpx.Response:
            body = {"prompt": "a", "n": n, "max_tokens": 9}
            return await client.post("/v1/completions", json=body, headers={"X-Request-Id": request_id})

        first = asyncio.ensure_future(ask("a", 2))
        await asyncio.to_thread(loop.wait_until, lambda: loop.num_running == 2)
        refused = await ask("a#1", 1)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id")
        assert refused.headers["X-Request-Id"] == "a#1"
        assert (await ask("b", 1)).status_code == 200
        assert [choice["text"] for choice in (await first).json()["choices"]] == [ANSWER[:9]] * 2
        assert loop.aborted == []
        assert (await ask("a#1", 2)).json()["id"] == "cmpl-a#1"
    engine.close_sync()
