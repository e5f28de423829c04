"""`pagedcore engine`: an engine at a Unix socket, until a signal comes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagedcore.async_engine import AsyncEngine
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError, EngineError
from pagedcore.remote.address import SocketPath
from pagedcore.remote.channel import take_turns_quickly
from pagedcore.remote.server import EngineServer
from pagedcore.warm_up import as_token_ids, read_warm_up_file

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


def run_engine(engine: AsyncEngine, server: EngineServer, signals: Signals, drain_timeout_s: float) -> None:
    """Until a signal comes; then take no more requests, and wait for the open ones, but not after a second signal.

    Raises `EngineError` when the engine ends by itself.
    """
    while not signals.wait(POLL_S):
        if not engine.loop.is_alive:
            raise EngineError("The engine has stopped by itself; see the log above.")
    server.begin_drain()
    deadline_s = time.monotonic() + drain_timeout_s
    while server.num_open and signals.num < 2 and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def serve_engine(config: EngineConfig, path: Path, drain_timeout_s: float, warmup_file: Path | None) -> None:
    """An engine at a socket until a signal comes. Raises what starting an engine raises."""
    from rich.console import Console

    take_turns_quickly()
    prompts = [] if warmup_file is None else read_warm_up_file(warmup_file)
    with served_engine(config, path) as (engine, server), ending_signals() as signals:
        engine.warm_up([as_token_ids(prompt, engine.text) for prompt in prompts])
        Console().print(engine_greeting(engine, path))
        run_engine(engine, server, signals, drain_timeout_s)


def engine_greeting(engine: AsyncEngine, path: Path) -> Any:
    """A panel: what is served, and how to attach to it."""
    from rich.markup import escape
    from rich.panel import Panel

    plan = engine.plan
    where = escape(str(path.absolute()))
    facts = (
        f"{plan.device}, {plan.dtype}, {plan.num_blocks} KV blocks of {plan.block_size} tokens, {plan.config.max_num_seqs} requests at once"
    )
    return Panel(
        f"[bold]{escape(plan.model_name)}[/bold]: {facts}\n\n"
        f'In Python     engine = AsyncEngine.connect("{where}")\n'
        f"Over HTTP     pagedcore serve --socket {where} --fronts 4\n"
        "Stop          Ctrl-C or SIGTERM; requests that run are finished first",
        title=f"pagedcore engine at {where}",
        expand=False,
    )
