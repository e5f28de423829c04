"""A real HTTP server on a free port, in a thread, for tests with real clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import uvicorn

from support.fake_client import WAIT_S


class _Server(uvicorn.Server):
    """Says when it listens; leaves the signals of the process alone."""

    def __init__(self, app: Any, lifespan: Literal["on", "off"]) -> None:
        super().__init__(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan=lifespan, ws="none"))
        self.listening = threading.Event()

    async def startup(self, sockets: object = None) -> None:
        await super().startup(None)
        self.listening.set()


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
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the server did not stop"
