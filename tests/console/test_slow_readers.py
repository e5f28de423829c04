"""The engine waits for no reader: a connection that takes nothing more holds up its own client alone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pagedcore.openai import build_app
from support.engine_builder import make_engine

NUM_TOKENS = 60


class StuckConnection:
    """What a server makes of a client that does not read: sending a body waits until `take` is set."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.take = asyncio.Event()
        self.is_stuck = asyncio.Event()
        self.sent: list[bytes] = []
        self._request = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        self._is_asked = False

    async def receive(self) -> dict[str, Any]:
        if self._is_asked:
            await asyncio.Event().wait()
        self._is_asked = True
        return self._request

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.is_stuck.set()
            await self.take.wait()
            self.sent.append(message["body"])

    @property
    def token_ids(self) -> list[int]:
        events = [line[6:] for line in b"".join(self.sent).splitlines() if line.startswith(b"data: {")]
        return [token for event in events for choice in json.loads(event)["choices"] for token in choice.get("token_ids") or []]


def scope_of(path: str) -> dict[str, Any]:
    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"stuck")]
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers, "client": ("c", 1), "server": ("s", 2),
    }  # fmt: skip


@pytest.mark.asyncio
async def test_the_engine_ends_a_request_whose_client_reads_nothing_and_what_is_left_is_sent_when_it_reads() -> None:
    built = make_engine()
    engine = built.engine
    body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True, "return_token_ids": True}
    connection = StuckConnection(body)
    asked = asyncio.create_task(build_app(engine)(scope_of("/v1/completions"), connection.receive, connection.send))  # type: ignore[arg-type]
    await connection.is_stuck.wait()
    await asyncio.to_thread(built.settle)
    record, stats = engine.history.find("stuck"), engine.stats()
    assert record is not None
    assert (record["status"], record["completion_tokens"]) == ("completed", NUM_TOKENS)
    assert (stats.num_running, stats.num_active_blocks) == (0, 0)
    assert connection.sent == []
    connection.take.set()
    await asked
    assert len(connection.token_ids) == NUM_TOKENS
    assert len(connection.sent) < NUM_TOKENS // 2  # what had come meanwhile went together
    await engine.close()
