"""A real HTTP server on a free port, in a thread, for tests with real clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import uvicorn

from support.fake_client import WAIT_S

CLOSING_POLL_S = 0.002


class _Server(uvicorn.Server):
    """Says when it listens; leaves the signals of the process alone; ends when told, where uvicorn looks ten times a second."""

    def __init__(self, app: Any, lifespan: Literal["on", "off"]) -> None:
        super().__init__(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan=lifespan, ws="none"))
        self.listening = threading.Event()
        self._told_to_end = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: object = None) -> None:
        await super().startup(None)
        self._loop = asyncio.get_running_loop()
        self.listening.set()

    def end(self) -> None:
        """From any thread, once it listens."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._told_to_end.set)

    async def main_loop(self) -> None:
        await self.on_tick(0)  # the headers of all replies
        await self._told_to_end.wait()

    async def shutdown(self, sockets: object = None) -> None:
        """As uvicorn's: no new connections, the end of those that are idle, then of those that are busy, then of the app."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110  uvicorn tells nobody when they have gone
            await asyncio.sleep(CLOSING_POLL_S)
        for server in self.servers:
            await server.wait_closed()
        await self.lifespan.shutdown()


@contextmanager
def live_server(app: Any, *, lifespan: Literal["on", "off"] = "off") -> Iterator[str]:
    """The base URL (without /v1) of a server that runs an ASGI app until the block ends."""
    server = _Server(app, lifespan)
    thread = threading.Thread(target=server.run, name="live-server", daemon=True)
    thread.start()
    assert server.listening.wait(WAIT_S), "the server did not start"
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.end()
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the server did not stop"
