"""An engine in a child process: a fresh interpreter at the other end of a socket pair, started again when it dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress

from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError, EngineError, EngineUnreachableError, PagedCoreError
from pagedcore.remote.link import Link
from pagedcore.remote.restarts import Restarts

NUM_LAST_LINES = 20
EXIT_TIMEOUT_S = 5.0

CHILD = "pagedcore.remote.child"


class ChildProcess:
    """Owns one child process and what it last wrote to standard error, which is passed on."""

    def __init__(self, config: EngineConfig, module: str) -> None:
        """Start `python -m module FD`, where FD is the child's end of the socket pair."""
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=child_environment(),
            )
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._reader = threading.Thread(target=self._read, name="pagedcore-child-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self, timeout_s: float) -> None:
        """Wait for it to end by itself; then kill it."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(EXIT_TIMEOUT_S)

    def epitaph(self) -> str:
        """How it ended."""
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"ended with exit code {code}"

    def last_lines(self) -> str:
        """What it last wrote to standard error."""
        return "".join(self._last_lines).strip()

    def _read(self) -> None:
        assert self._process.stderr is not None, "it is a pipe"
        with self._process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace")
                self._last_lines.append(text)
                with suppress(OSError, ValueError):  # nobody listens to this process either
                    sys.stderr.write(text)


def child_environment() -> dict[str, str]:
    """This process' environment, in which a child finds the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class Supervised:
    """The `LinkSource` of an engine that is this process' own. Owns the child process, one after another."""

    is_owner = True

    def __init__(self, config: EngineConfig, *, module: str = CHILD) -> None:
        """`module` is what the child runs. Raises `ConfigError` where there are no Unix sockets to hand to a child."""
        if sys.platform == "win32":
            raise ConfigError("isolation='process' needs a Unix system; use isolation='thread'.")
        self._config = config.replace(isolation="thread")
        self._module = module
        self._child: ChildProcess | None = None
        self._ready_s: float | None = None
        """Since when the present child is ready."""
        self._restarts = Restarts()

    def open(self) -> Link:
        """Start a child and wait until its engine is warm. Raises the error with which that fails there."""
        child = self._child = ChildProcess(self._config, self._module)
        try:
            link = Link(child.socket, config=self._config)
        except EngineUnreachableError as error:
            child.end(EXIT_TIMEOUT_S)
            raise EngineError(f"The engine process {child.epitaph()} before it was ready. {_quoted(child)}") from error
        except BaseException:
            child.end(EXIT_TIMEOUT_S)
            raise
        self._ready_s = time.monotonic()
        return link

    def reopen(self, stop: threading.Event) -> Link | None:
        """Start another child, with a pause that grows. Raises `EngineError` where several in a row die soon."""
        reason = self.explain_loss()
        while True:
            delay_s = self._restarts.note_death(0.0 if self._ready_s is None else time.monotonic() - self._ready_s)
            self._ready_s = None
            if self._restarts.is_hopeless:
                raise EngineError(
                    f"{reason} It died {self._restarts.num_failures} times soon after its start and is given up. {self._last()}"
                )
            if stop.wait(delay_s):
                return None
            try:
                return self.open()
            except PagedCoreError as error:
                reason = str(error)

    def explain_loss(self) -> str:
        assert self._child is not None, "there was a link"
        self._child.end(EXIT_TIMEOUT_S)
        return f"The engine process {self._child.pid} {self._child.epitaph()}."

    outlook = "It is being started again; try again in a moment."

    def close(self, timeout_s: float) -> None:
        """The child ends by itself when its link has ended, or is killed."""
        if self._child is not None:
            self._child.end(timeout_s)

    def _last(self) -> str:
        assert self._child is not None, "one has died"
        return _quoted(self._child)


def _quoted(child: ChildProcess) -> str:
    lines = child.last_lines()
    return f"It last wrote:\n{lines}" if lines else "It wrote nothing to standard error."
