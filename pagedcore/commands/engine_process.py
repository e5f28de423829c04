"""`pagedcore engine`: an engine at a Unix socket, until a signal comes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pagedcore.async_engine import AsyncEngine
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError, EngineError
from pagedcore.remote.address import SocketPath
from pagedcore.remote.server import EngineServer

POLL_S = 0.1


class Signals:
    """Owns the count of the signals that asked this process to end."""

    def __init__(self) -> None:
        self.num = 0
        self._came = threading.Event()

    def take(self, *_: object) -> None:
        """One more; a handler."""
        self.num += 1
        self._came.set()

    def wait(self, timeout_s: float) -> bool:
        """Until one has come, or time runs out; True when one has."""
        return self._came.wait(timeout_s)


@contextmanager
def ending_signals() -> Iterator[Signals]:
    """SIGINT and SIGTERM are counted inside, and nothing else happens."""
    signals = Signals()
    before = {number: signal.signal(number, signals.take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def served_engine(
    config: EngineConfig, path: str | Path, make_engine: Callable[[EngineConfig], AsyncEngine] = AsyncEngine
) -> Iterator[tuple[AsyncEngine, EngineServer]]:
    """A warm engine that listens at the path; both end with the block. The path is claimed before the model is loaded.

    Raises `ConfigError` for the path, and what making an engine raises.
    """
    if config.isolation == "process":
        raise ConfigError("This command is the engine's own process; leave out --isolation process.")
    claimed = SocketPath(path)
    try:
        engine = make_engine(config)
        try:
            server = EngineServer(engine, claimed)
            try:
                yield engine, server
            finally:
                engine.close_sync()
                server.close()
        finally:
            engine.close_sync()
    finally:
        claimed.close()


def run_engine(engine: AsyncEngine, server: EngineServer, signals: Signals, grace_s: float) -> None:
    """Until a signal comes; then take no more requests, and wait for the open ones, but not after a second signal.

    Raises `EngineError` when the engine ends by itself.
    """
    while not signals.wait(POLL_S):
        if not engine.loop.is_alive:
            raise EngineError("The engine has stopped by itself; see the log above.")
    server.begin_drain()
    deadline_s = time.monotonic() + grace_s
    while server.num_open and signals.num < 2 and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
