"""One HTTP front over an engine in another process: the OpenAI routes by uvicorn, in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from pagedcore.async_engine import AsyncEngine
from pagedcore.commands.engine_process import ending_signals
from pagedcore.errors import ConfigError, PagedCoreError
from pagedcore.garbage import GarbageHold
from pagedcore.openai import ServerSettings, build_app
from pagedcore.remote.attached import ENGINE_START_TIMEOUT_S
from pagedcore.remote.channel import take_turns_quickly

if TYPE_CHECKING:
    import uvicorn

WATCH_S = 0.5
BACKLOG = 2048
LAST_WORDS_S = 1
"""How long the ends of answers that were aborted may take to reach their clients."""

CloseEngine = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPlan:
    """What one front serves, and where. It goes to a process as JSON, so its settings have no `tenant_of`."""

    engine_socket: str
    host: str
    port: int
    settings: ServerSettings
    drain_timeout_s: float
    """How long answers that have begun may take after a signal."""
    shares_port: bool = False
    """Other fronts listen there too; the kernel spreads the connections."""


def serve_front(plan: FrontPlan, on_ready: Callable[[AsyncEngine], None]) -> None:
    """Serve until SIGINT or SIGTERM; open answers end first.

    Raises `ConfigError` for an address that cannot be used, and `EngineUnreachableError` where no engine is.
    """
    server_type = _server_type()
    listener = listen(plan.host, plan.port, is_shared=plan.shares_port)
    engine = AsyncEngine.connect(plan.engine_socket, timeout_s=ENGINE_START_TIMEOUT_S)
    hold = GarbageHold()

    def ready() -> None:
        hold.take()  # a full collection would halt every stream for tens of milliseconds
        on_ready(engine)

    try:
        app = build_app(engine, plan.settings)
        with ending_signals():  # uvicorn raises those that it got once more at its end
            server_type(app, plan.drain_timeout_s, ready, engine.close).run(sockets=[listener])
    finally:
        hold.release()
        engine.close_sync()
        listener.close()


def listen(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A bound socket. Raises `ConfigError` for an address that is in use, or is none of this machine's."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"port {port} of {host} cannot be used: {error.strerror}; choose another port.") from error
    return sock


def _server_type() -> Callable[[Any, float, Callable[[], None], CloseEngine], uvicorn.Server]:
    import uvicorn

    class FrontServer(uvicorn.Server):
        """Says when it listens, and aborts what is left of its answers when the time for them is over."""

        def __init__(self, app: Any, drain_timeout_s: float, on_ready: Callable[[], None], close: CloseEngine) -> None:
            options: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off", "ws": "none", "backlog": BACKLOG}
            # Answers that uvicorn itself has to end break off, and each leaves a traceback.
            super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=round(drain_timeout_s) + LAST_WORDS_S, **options))
            self._drain_timeout_s = drain_timeout_s
            self._on_ready = on_ready
            self._close = close

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if not self.should_exit:
                self._on_ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            closing = asyncio.ensure_future(self._close_late())
            try:
                await super().shutdown(sockets)
            finally:
                closing.cancel()

        async def _close_late(self) -> None:
            await asyncio.sleep(self._drain_timeout_s)
            await self._close()

    return FrontServer


def _end_with(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(WATCH_S)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """The body of a front process: its plan is JSON on standard input; it writes a line when it is ready, and ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too, which says when to end
    take_turns_quickly()
    threading.Thread(target=_end_with, args=(os.getppid(),), name="pagedcore-parent", daemon=True).start()
    plan = msgspec.json.decode(sys.stdin.read(), type=FrontPlan)
    try:
        serve_front(plan, lambda _: print("ready", flush=True))  # noqa: T201  its parent reads it
    except PagedCoreError as error:
        sys.stderr.write(f"pagedcore: {error}\n")
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
