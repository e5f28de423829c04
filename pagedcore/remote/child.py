"""The body of an engine's child process: build the engine that the parent describes, serve its one front, and end with it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import msgspec

from pagedcore.async_engine import AsyncEngine
from pagedcore.config import EngineConfig
from pagedcore.engine_build import build_engine
from pagedcore.engine_loop import EngineLoop
from pagedcore.errors import PagedCoreError
from pagedcore.observe.recorder import Recorder
from pagedcore.remote.channel import Channel, Packer, take_turns_quickly
from pagedcore.remote.connection import Connection, Desk, read_hello
from pagedcore.remote.faults import fault_of
from pagedcore.remote.frames import Refusal
from pagedcore.remote.numbers import ForwardingRecorder

WATCH_S = 0.5
SEND_TIMEOUT_S = 10.0

Build = Callable[[EngineConfig, Callable[..., Recorder]], EngineLoop]
"""Makes the engine of a config, with a recorder that is made by the second argument."""


def main(build: Build = lambda config, recorder: build_engine(config, make_recorder=recorder)) -> None:
    """Serve at the socket whose descriptor is the first argument. Ends the process with 0 when the parent wanted that, else with 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever signals all processes at once means the parent, which lets answers end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    take_turns_quickly()
    packer = Packer()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), packer, name="front")
    watch = _Watch(channel)
    hello = read_hello(channel)
    if hello is None:
        raise SystemExit(1)
    config = msgspec.msgpack.decode(hello.config, type=EngineConfig)
    try:
        engine = AsyncEngine(loop=build(config, partial(ForwardingRecorder, send=channel.put)))
    except PagedCoreError as error:
        channel.put(Refusal(fault_of(error)))
        _end(channel, 1)
    watch.loop = engine.loop
    Connection(Desk(engine), channel, packer).serve()
    is_well = engine.loop.is_alive
    engine.close_sync()
    _end(channel, 0 if is_well else 1)


class _Watch:
    """Owns a thread that ends the process with its parent, and the connection with the engine."""

    def __init__(self, channel: Channel) -> None:
        self.loop: EngineLoop | None = None
        self._channel = channel
        self._parent_pid = os.getppid()
        threading.Thread(target=self._run, name="pagedcore-parent", daemon=True).start()

    def _run(self) -> None:
        while os.getppid() == self._parent_pid:
            if self.loop is not None and not self.loop.is_alive:
                self._channel.finish()  # the parent starts another process
            time.sleep(WATCH_S)
        os._exit(1)


def _end(channel: Channel, code: int) -> None:
    """Leave at once when all is sent: device libraries have threads of their own, which need not agree."""
    channel.finish()
    channel.join(SEND_TIMEOUT_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
