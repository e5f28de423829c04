"""One connected socket, and the frames that go through it."""

from __future__ import annotations

import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from pagedcore.messages import RequestUpdate
from pagedcore.remote.frames import Updates, encode, to_wire

MAX_FRAME_BYTES = 2**30
"""Nothing of ours is longer; a length above it is no length."""

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter while others wait for it, in a process that is ours alone; Python's own is ten times that."""

_LENGTH = struct.Struct(">I")


Pack = Callable[[list[Any]], Iterable[bytes]]
"""Makes encoded frames of what was put into a channel since the last call."""


class Packer:
    """Packs what goes to a front: updates that follow each other, of one step or of several, share a frame."""

    def __init__(self) -> None:
        self.num_packed = 0

    def __call__(self, items: list[Any]) -> Iterator[bytes]:
        updates: list[RequestUpdate] = []
        for item in items:
            if isinstance(item, list):
                updates += item
            else:
                yield from self._frames(updates)
                yield encode(item)
                updates = []
        yield from self._frames(updates)

    def _frames(self, updates: list[RequestUpdate]) -> Iterator[bytes]:
        if updates:
            yield encode(Updates([to_wire(update) for update in updates]))
            self.num_packed += len(updates)


class Channel:
    """Owns the socket. `put` may be called from any thread and never waits; one thread may `read`.

    What is put goes out on a thread of the channel, together with all that came meanwhile; the other side's end of the
    channel ends it, too.
    """

    def __init__(self, sock: socket.socket, pack: Pack, *, name: str) -> None:
        self._sock = sock
        self._pack = pack
        self._file = sock.makefile("rb")
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=f"pagedcore-to-{name}", daemon=True)
        self._writer.start()

    def put(self, item: object) -> None:
        self._outgoing.put(item)

    def read(self) -> bytes | None:
        """The next frame; None at the end. Raises `TimeoutError` where the socket has a timeout."""
        try:
            header = self._file.read(_LENGTH.size)
            size = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else 0
            body = self._file.read(size) if size <= MAX_FRAME_BYTES else b""
        except TimeoutError:
            raise
        except (OSError, ValueError):  # reset, or closed here
            return None
        return body if size and len(body) == size else None

    def set_timeout(self, timeout_s: float | None) -> None:
        """How long a read may take; None is for ever."""
        self._sock.settimeout(timeout_s)

    def finish(self) -> None:
        """Send what was put so far, and then the end."""
        self._outgoing.put(_END)

    def join(self, timeout_s: float) -> None:
        """Wait until everything is sent, after `finish`."""
        self._writer.join(timeout_s)

    def abort(self) -> None:
        """End both directions at once, whatever waits."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._outgoing.put(_END)

    def close(self) -> None:
        """Give the socket back, after the last read."""
        self.abort()
        self._file.close()
        self._sock.close()

    def detach(self) -> int:
        """The socket's descriptor, which this object forgets: for a forked child, whose copy it is."""
        return self._sock.detach()

    def _write(self) -> None:
        is_open = True
        try:
            while is_open:
                items = [self._outgoing.get()]
                items += [self._outgoing.get() for _ in range(self._outgoing.qsize())]
                if _END in items:
                    is_open, items = False, items[: items.index(_END)]
                self._sock.sendall(b"".join(map(_framed, self._pack(items))))
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the other side is gone, which the reader is told
        finally:
            if is_open:
                self.abort()


_END = object()


def take_turns_quickly() -> None:
    """For a process that is ours alone: a step's updates leave while the next step is planned, not after it."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body
