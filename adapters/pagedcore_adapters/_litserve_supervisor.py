"""The watch over the processes of a server: a worker that ends is started again."""

from __future__ import annotations

import multiprocessing.connection
import threading
import time
from collections.abc import Mapping, MutableSequence
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Protocol, cast

POLL_S = 0.2
"""So often it looks whether a pause is over."""
REAP_S = 5.0
"""A process closes what it holds a moment before its exit code is known."""


class Host(Protocol):
    """The server, as its supervisor sees it. Called on the supervisor's thread."""

    def on_worker_death(self, worker_id: int, process: BaseProcess) -> float | None:
        """A worker has ended. Seconds until it is started again; None for never."""
        ...

    def restart_worker(self, worker_id: int) -> BaseProcess:
        """Start it again."""
        ...

    def on_api_server_death(self, queue_id: int) -> None:
        """An API server has ended."""
        ...


class Supervisor:
    """Owns which worker processes run, once they serve. `run` is a thread's; `stop` may be called from any."""

    def __init__(self, workers: MutableSequence[BaseProcess], api_servers: Mapping[int, BaseProcess], host: Host) -> None:
        """A worker that is started again takes its place in `workers`."""
        self._workers = workers
        self._host = host
        self._running = {process.sentinel: partial(self._bury, number) for number, process in enumerate(workers)}
        self._running |= {process.sentinel: partial(host.on_api_server_death, number) for number, process in api_servers.items()}
        """What to do at the end of each process that runs."""
        self._due_s: dict[int, float] = {}
        self._is_stopped = False
        self._lock = threading.Lock()

    def run(self) -> None:
        """Until it is stopped, or the manager is gone and nobody could be told."""
        with suppress(EOFError, OSError):
            while not self._is_stopped:
                self.step()

    def step(self) -> None:
        """Look once: tell of all that have ended, start what is due."""
        for ended in multiprocessing.connection.wait(list(self._running), POLL_S):
            self._running.pop(cast("int", ended))()
        for worker_id in [one for one, due_s in self._due_s.items() if due_s <= time.monotonic()]:
            self._restart(worker_id)

    def stop(self) -> None:
        """Start nothing from now on."""
        with self._lock:
            self._is_stopped = True

    def _bury(self, worker_id: int) -> None:
        self._workers[worker_id].join(REAP_S)
        pause_s = self._host.on_worker_death(worker_id, self._workers[worker_id])
        if pause_s is not None:
            self._due_s[worker_id] = time.monotonic() + pause_s

    def _restart(self, worker_id: int) -> None:
        del self._due_s[worker_id]
        with self._lock:
            if self._is_stopped:
                return
            process = self._workers[worker_id] = self._host.restart_worker(worker_id)
        self._running[process.sentinel] = partial(self._bury, worker_id)
