"""The way of ended requests off the engine thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import Protocol

from pagedcore.guard import Guard
from pagedcore.tracing.life import Life

MAX_UNWRITTEN = 8192
"""Ended requests that wait to be written; what comes beyond is dropped."""

CLOSE_TIMEOUT_S = 10.0

GATHER_S = 0.05
"""After the first one the thread waits so long for others: woken by each request, it would take the interpreter from the engine thread
in every step."""

logger = logging.getLogger(__name__)


class Taker(Protocol):
    """Does something with requests that have ended: the request log, the spans."""

    def take(self, lives: Sequence[Life]) -> None: ...

    def close(self) -> None:
        """Nothing comes any more; what was taken is where it belongs when this returns."""
        ...


class Writer:
    """Owns the thread that hands ended requests to the takers, in order, and the bounded queue before it.

    `put` never blocks: a disk or a collector that hangs costs lines, not tokens. What is dropped is counted, and said once.
    """

    def __init__(self, takers: Sequence[Taker]) -> None:
        self._takers = [(Guard("Ended requests could not be handed on."), taker) for taker in takers]
        self._lives: queue.SimpleQueue[Life | None] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pagedcore-request-log", daemon=True)
        self.num_dropped = 0
        self._thread.start()

    def put(self, life: Life) -> None:
        """Hand over a life that nobody changes any more."""
        if self._lives.qsize() < MAX_UNWRITTEN:
            self._lives.put(life)
            return
        if not self.num_dropped:
            logger.error("%d ended requests wait to be written; the request log and the spans leave out what comes beyond.", MAX_UNWRITTEN)
        self.num_dropped += 1

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write what waits, then close the takers; gives up after `timeout_s`. Called once."""
        self._lives.put(None)
        self._is_closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("The request log or the collector of the spans did not take everything within %g s.", timeout_s)
        if self.num_dropped:
            logger.error("%d ended requests were left out of the request log and the spans.", self.num_dropped)

    def _run(self) -> None:
        is_open = True
        while is_open:
            lives = self._next()
            is_open = lives[-1] is not None
            ended = [life for life in lives if life is not None]
            for guard, taker in self._takers:  # what a host's span processor raises must not cost the log its lines
                guard(taker.take, ended)
        for guard, taker in self._takers:
            guard(taker.close)

    def _next(self) -> list[Life | None]:
        """All that has come a moment after the first, at least one; None stands last, if at all."""
        lives = [self._lives.get()]
        self._is_closing.wait(GATHER_S)
        while lives[-1] is not None and not self._lives.empty():
            lives.append(self._lives.get())
        return lives
