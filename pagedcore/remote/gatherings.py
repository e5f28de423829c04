"""How often, and for how long, fronts may let an engine wait for requests that come together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from pagedcore.engine_loop import MAX_GATHERING_S
from pagedcore.errors import EngineClosedError

if TYPE_CHECKING:
    from pagedcore.engine_loop import EngineLoop

SHARE = 0.1
"""Of the time, that an engine may wait in the long run."""
MAX_CREDIT_S = 10 * MAX_GATHERING_S
"""What it may wait at once, after a while without."""
MIN_COST_S = 0.001
"""Of a gathering, however short."""


class Gatherings:
    """Owns the one gathering that all fronts of an engine may have open at a time. Thread-safe.

    One that would make the engine wait too often is passed over: its requests are planned as they come, which is slower and no
    fault.
    """

    def __init__(self, loop: EngineLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._holder: object = None
        self._open = ExitStack()
        self._began_s = self._counted_s = clock()
        self._credit_s = MAX_CREDIT_S
        """How long the engine may wait, at `_counted_s`."""
        self._lock = threading.Lock()

    def begin(self, holder: object) -> None:
        """What comes from now on is planned together, until `end`, where the engine may wait now."""
        with self._lock:
            now_s = self._clock()
            if self._holder is not None and now_s - self._began_s >= MAX_GATHERING_S:
                self._close()  # the engine waits no more for who never says the end
            self._credit_s = min(self._credit_s + SHARE * (now_s - self._counted_s), MAX_CREDIT_S)
            self._counted_s = now_s
            if self._holder is not None or self._credit_s < MAX_GATHERING_S:
                return
            with suppress(EngineClosedError):
                self._open.enter_context(self._loop.gathering())
                self._holder, self._began_s = holder, now_s

    def end(self, holder: object) -> None:
        """Of this holder's gathering, if it has one."""
        with self._lock:
            if self._holder is holder:
                self._close()

    def _close(self) -> None:
        self._credit_s -= max(min(self._clock() - self._began_s, MAX_GATHERING_S), MIN_COST_S)
        self._holder = None
        self._open.close()
