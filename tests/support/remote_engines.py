"""Engines at a Unix socket in the test's own process, and engines in a child process, both on the fake runner."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcore.async_engine import AsyncEngine
from pagedcore.config import EngineConfig
from pagedcore.outputs import RequestOutput
from pagedcore.remote import frames
from pagedcore.remote.address import SocketPath, connect_to
from pagedcore.remote.channel import Channel
from pagedcore.remote.loop import RemoteLoop
from pagedcore.remote.process import Supervised
from pagedcore.remote.server import EngineServer
from pagedcore.sampling_params import SamplingParams
from support.engine_builder import Built, make_engine
from support.fake_child import LONG
from support.served import wait_until

WAIT_S = 60.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=3000)
"""It takes a fake runner, whose steps grow with the length, longer than any test."""


@dataclass(slots=True)
class Hosted:
    """An engine, its server and where that listens."""

    built: Built
    server: EngineServer
    path: Path

    def connect(self) -> AsyncEngine:
        return AsyncEngine.connect(self.path)

    def running_ids(self) -> list[str]:
        """Ids that the engine's own books have open."""
        return list(self.built.loop._outboxes)

    def close(self) -> None:
        """Stop as `pagedcore engine` does."""
        self.built.runner.gate.set()
        self.built.engine.close_sync()
        self.server.close()


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose name leaves room: the path of a socket may not be long."""
    folder = Path(tempfile.mkdtemp(prefix="pc-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def hosted(**options: Any) -> Iterator[Hosted]:
    """An engine of `make_engine(**options)` at a socket, until the block ends."""
    with short_folder() as folder:
        one = host(folder / "engine.sock", **options)
        try:
            yield one
        finally:
            one.close()


def host(path: Path, **options: Any) -> Hosted:
    built = make_engine(**{**LONG, **options})
    claimed = SocketPath(path)
    return Hosted(built, EngineServer(built.engine, claimed), claimed.path)


@contextmanager
def connected(one: Hosted) -> Iterator[AsyncEngine]:
    """A front of its own, until the block ends."""
    front = one.connect()
    try:
        yield front
    finally:
        front.close_sync()


@contextmanager
def child_engine(**options: Any) -> Iterator[AsyncEngine]:
    """An engine in a child process, as with isolation="process"; see `support.fake_child`."""
    engine = AsyncEngine(remote=RemoteLoop(Supervised(EngineConfig(**options), module="support.fake_child")))
    try:
        yield engine
    finally:
        engine.close_sync()


def child_pid(engine: AsyncEngine) -> int:
    """The process of an engine that runs in a child process, or elsewhere."""
    link = engine._remote._link
    assert link is not None
    return link.welcome.pid


def raw_front(one: Hosted) -> Channel:
    """A front that says what the test wants."""
    return Channel(connect_to(one.path), lambda batch: map(frames.encode, batch), name="test")


def greeted(channel: Channel) -> Channel:
    """The same, once the engine has taken it for a front."""
    channel.put(frames.Hello(frames.protocol(), "test"))
    assert isinstance(frames.decode_from_engine(channel.read() or b""), frames.Welcome)
    return channel


def run(engine: AsyncEngine, prompt: list[int], params: SamplingParams = GREEDY, request_id: str | None = None) -> RequestOutput:
    """The last output of a request."""
    *_, last = engine.generate_sync(prompt, params, request_id)
    return last


def wait_for(condition: Any, what: str) -> None:
    wait_until(condition, WAIT_S, what)
