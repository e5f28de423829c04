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
    async with _WhileConnected(receive):
        return await work


class _WhileConnected:
    """An `async with` block that lives as long as its client.

    When that leaves first, the task is cancelled where it waits inside the block, and the block raises `ClientDisconnect`.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._has_left = self._is_over = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._task, self._num_cancels = task, task.cancelling()
        self._hearing = asyncio.ensure_future(self._hear())
        self._hearing.add_done_callback(self._end)

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._is_over = True
        self._hearing.cancel()
        if self._has_left and self._task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            raise ClientDisconnect

    async def _hear(self) -> None:
        with suppress(Exception):  # a server that cannot say whether the client is there has lost it
            while (await self._receive())["type"] != "http.disconnect":
                pass

    def _end(self, hearing: asyncio.Task[None]) -> None:
        if not self._is_over:
            self._has_left = True
            self._task.cancel()


class EventStream(Response):
    """Server-sent events from a generator, which is always closed at the end: whoever leaves, leaves nothing running."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):  # nobody is there to be told
            # In a task of its own: each token would go through all the middleware that this one stands in.
            await until_disconnect(receive, asyncio.ensure_future(self._send_all(send)))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
