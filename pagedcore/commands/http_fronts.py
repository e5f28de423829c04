"""Several HTTP fronts, each a process, over one engine: a front's own work then never shares an interpreter with the engine's."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from pagedcore.commands.engine_process import POLL_S, Signals
from pagedcore.commands.http_front import FrontPlan, listen
from pagedcore.errors import ConfigError, EngineError
from pagedcore.remote.process import child_environment
from pagedcore.remote.restarts import Restarts


class FrontProcess:
    """Owns one front: its process, and another one when that dies."""

    def __init__(self, plan: FrontPlan) -> None:
        self._plan = plan
        self._restarts = Restarts()
        self._starts_at_s: float | None = None
        self._process = self._start()

    def wait_until_ready(self, signals: Signals) -> bool:
        """False when a signal came first. One that is killed meanwhile gets a successor, since another front may be serving by now.

        Raises `EngineError` when the process ends by itself before, and after several that were killed.
        """
        while not signals.num:
            if self._has_spoken():
                return True
            self.revive()
        return False

    def _has_spoken(self) -> bool:
        """Wait a moment for the word that it is ready. Raises `EngineError` when it has ended with an exit code."""
        said = self._process.stdout
        assert said is not None, "it is a pipe"
        if not select.select([said], [], [], POLL_S)[0]:
            return False
        if said.readline():
            return True
        if (code := self._process.wait()) > 0:
            raise EngineError(f"An HTTP front ended with exit code {code} before it was ready; see the log above.")
        time.sleep(POLL_S)  # its pipe stays at its end until a successor is there
        return False

    def revive(self) -> None:
        """If it is dead, start another one after a while. Raises `EngineError` after several quick deaths."""
        if self._starts_at_s is None and self._process.poll() is not None:
            delay_s = self._restarts.note_death(time.monotonic() - self._started_s)
            if self._restarts.is_hopeless:
                raise EngineError(f"An HTTP front ended with exit code {self._process.returncode} again and again; see the log above.")
            self._starts_at_s = time.monotonic() + delay_s
        elif self._starts_at_s is not None and time.monotonic() >= self._starts_at_s:
            self._starts_at_s = None
            self._process = self._start()

    def terminate(self) -> None:
        """Let it end its answers and itself."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def end(self, timeout_s: float) -> None:
        """Wait for that, then kill it."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None, "it is a pipe"
        self._process.stdout.close()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def _start(self) -> subprocess.Popen[bytes]:
        self._started_s = time.monotonic()
        command = [sys.executable, "-P", "-m", "pagedcore.commands.http_front"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment())
        assert process.stdin is not None, "it is a pipe"
        with suppress(BrokenPipeError), process.stdin as plan:  # keys are no arguments, which everybody on the machine sees
            plan.write(msgspec.json.encode(self._plan))
        return process


def run_fronts(plan: FrontPlan, num_fronts: int, signals: Signals, on_ready: Callable[[], None], is_well: Callable[[], bool]) -> None:
    """Serve with `num_fronts` processes until a signal comes; a second signal does not wait for open answers.

    Raises `ConfigError` for the address, and `EngineError` when a front cannot go on or `is_well` says no.
    """
    with _reserved(plan.host, plan.port):
        fronts = [FrontProcess(plan) for _ in range(num_fronts)]
        try:
            if all(front.wait_until_ready(signals) for front in fronts):
                on_ready()
            while not signals.wait(POLL_S):
                if not is_well():
                    raise EngineError("The engine has stopped by itself; see the log above.")
                for front in fronts:
                    front.revive()
        finally:
            _end_all(fronts, signals, plan.drain_timeout_s)


def _end_all(fronts: list[FrontProcess], signals: Signals, drain_timeout_s: float) -> None:
    for front in fronts:
        front.terminate()
    deadline_s = time.monotonic() + drain_timeout_s
    while any(front.is_running for front in fronts) and signals.num < 2 and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    for front in fronts:
        front.end(1.0 if signals.num < 2 else 0.0)


def _reserved(host: str, port: int) -> socket.socket:
    """Nobody else listens there now; the socket, which does not either, keeps it so between two fronts' lives."""
    if not hasattr(socket, "SO_REUSEPORT") or os.name != "posix":
        raise ConfigError("This system cannot share a port between processes; leave out --fronts.")
    listen(host, port).close()
    return listen(host, port, is_shared=True)
