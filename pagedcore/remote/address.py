"""Where an engine listens: a Unix socket that only its own user reaches."""

from __future__ import annotations

import os
import socket
import struct
import sys
from pathlib import Path

from filelock import FileLock, Timeout

from pagedcore.errors import ConfigError, EngineRefusedError, EngineUnreachableError

MAX_PATH_BYTES = 103
"""Of a socket's path, on the strictest system."""


class SocketPath:
    """Owns the path of one engine's socket, from before its model is loaded until it has ended; one process has it at a time."""

    def __init__(self, path: str | Path) -> None:
        """Raises `ConfigError` for a path that cannot be used, and for one at which an engine lives."""
        self.path = checked_path(path)
        self._socket: socket.socket | None = None
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = FileLock(f"{self.path}.lock", mode=0o600)
            self._lock.acquire(blocking=False)
            self._remove_stale()
        except Timeout:
            raise ConfigError(f"An engine already listens at {self.path}; stop it, or choose another --socket.") from None
        except OSError as error:
            raise ConfigError(f"The socket {self.path} cannot be made: {error.strerror}; choose another --socket.") from error

    def listen(self) -> socket.socket:
        """The listening socket, which nobody but this user can connect to."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.path))
        self.path.chmod(0o600)  # before it listens, so nobody came in between
        self._socket.listen()
        return self._socket

    def close(self) -> None:
        """Take the socket away; may be called twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self.path.unlink(missing_ok=True)
        self._lock.release()

    def _remove_stale(self) -> None:
        """We hold the lock, so a socket that is there is of an engine that died."""
        if self.path.is_socket():
            self.path.unlink()
        elif self.path.exists():
            self._lock.release()
            raise ConfigError(f"{self.path} exists and is no socket; choose another --socket.")


def checked_path(path: str | Path) -> Path:
    """The absolute path. Raises `ConfigError` for one that is too long for a socket, and where there are no Unix sockets."""
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigError("This system has no Unix sockets; run the engine with isolation='thread'.")
    absolute = Path(path).absolute()
    if len(os.fsencode(absolute)) > MAX_PATH_BYTES:
        raise ConfigError(f"The socket's path has {len(os.fsencode(absolute))} bytes, at most {MAX_PATH_BYTES} are possible: {absolute}.")
    return absolute


def connect_to(path: Path) -> socket.socket:
    """A connection to the engine at this path. Raises `EngineUnreachableError` where there is none, or another user's."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(str(path))
        if peer_uid(sock) != os.getuid():
            raise EngineRefusedError(f"The engine at {path} is another user's (uid {peer_uid(sock)}); start one as this user.")
    except OSError as error:
        sock.close()
        raise EngineUnreachableError(
            f"No engine answers at {path} ({error.strerror}); start one with `pagedcore engine --socket {path}`, as the same user."
        ) from error
    except EngineUnreachableError:
        sock.close()
        raise
    return sock


def peer_uid(sock: socket.socket) -> int:
    """The user of the process at the other end, as the kernel knows it."""
    if sys.platform == "darwin":
        return int(struct.unpack_from("II", sock.getsockopt(0, 1, 76))[1])  # SOL_LOCAL, LOCAL_PEERCRED, struct xucred
    return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])
