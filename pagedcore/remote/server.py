"""A running engine at a Unix socket, for any number of fronts of the same user."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from pagedcore.errors import EngineRefusedError
from pagedcore.remote.address import SocketPath, peer_uid
from pagedcore.remote.channel import Channel, Packer
from pagedcore.remote.connection import Connection, Desk, read_hello
from pagedcore.remote.faults import fault_of
from pagedcore.remote.frames import Refusal

if TYPE_CHECKING:
    from pagedcore.async_engine import AsyncEngine

HELLO_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 10.0
POLL_S = 0.02

logger = logging.getLogger(__name__)


class EngineServer:
    """Owns the listening socket of an engine, which somebody else owns, and the connections to it."""

    def __init__(self, engine: AsyncEngine, path: SocketPath) -> None:
        """Listen from now on, at a path that was claimed for it."""
        self._desk = Desk(engine)
        self._path = path
        self._numbers = itertools.count()
        self._connections: dict[Connection, Channel] = {}
        self._lock = threading.Lock()
        self._socket = path.listen()
        self._thread = threading.Thread(target=self._accept, name="pagedcore-accept", daemon=True)
        self._thread.start()

    @property
    def num_fronts(self) -> int:
        return len(self._connections)

    @property
    def num_open(self) -> int:
        """Requests of all fronts that the engine has not ended."""
        with self._lock:
            return sum(connection.num_open for connection in self._connections)

    def begin_drain(self) -> None:
        """Take no more requests; the open ones go on."""
        self._desk.refusal = "The engine is draining and takes no more requests."
        with self._lock:
            for connection in self._connections:
                connection.refuse(self._desk.refusal)

    def close(self) -> None:
        """Send what was said, end every connection and take the socket away. Close the engine first: its requests end in order then."""
        self._desk.refusal = self._desk.refusal or "The engine is closed."
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._path.close()
        self._thread.join(LEAVE_TIMEOUT_S)
        with self._lock:
            channels = list(self._connections.values())
        for channel in channels:
            channel.finish()
        for channel in channels:
            channel.join(LEAVE_TIMEOUT_S)
            channel.abort()
        self._desk.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(sock, next(self._numbers)), name="pagedcore-from-front", daemon=True).start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        packer = Packer()
        channel = Channel(sock, packer, name="front")
        try:
            if self._is_ours(sock, channel) and self._shakes_hands(channel):
                connection = Connection(self._desk, channel, packer, number)
                with self._lock:
                    self._connections[connection] = channel
                try:
                    connection.serve()
                    self._let_go(connection)
                finally:
                    with self._lock:
                        del self._connections[connection]
        finally:
            channel.finish()
            channel.join(LEAVE_TIMEOUT_S)
            channel.close()

    def _is_ours(self, sock: socket.socket, channel: Channel) -> bool:
        uid = peer_uid(sock)
        if uid == os.getuid():
            return True
        logger.warning("A process of user %d was refused; only user %d may use this engine.", uid, os.getuid())
        channel.put(Refusal(fault_of(EngineRefusedError(f"The engine is another user's (uid {os.getuid()}); start one as this user."))))
        return False

    def _shakes_hands(self, channel: Channel) -> bool:
        channel.set_timeout(HELLO_TIMEOUT_S)
        try:
            return read_hello(channel) is not None
        except TimeoutError:
            return False
        finally:
            channel.set_timeout(None)

    def _let_go(self, connection: Connection) -> None:
        """A front that left in order hears of the ends of its requests."""
        deadline_s = time.monotonic() + LEAVE_TIMEOUT_S
        while connection.num_open and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
