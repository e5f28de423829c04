"""Work that lives as long as its client: a disconnect cancels it, streaming or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedcore.http.json_text import dumps

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def sse(payload: object) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(payload) + b"\n\n"


def sse_error(body: object) -> bytes:
    """An event after which the stream ends; OpenAI's clients raise on it."""
    return b"event: error\n" + sse(body)


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`. Raises `ClientDisconnect`, with the work cancelled and ended, when the client leaves first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from a generator, which is always closed at the end: whoever leaves, leaves nothing running."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):  # nobody is there to be told
            await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
