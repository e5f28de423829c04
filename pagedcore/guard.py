"""Calls whose failure is not their caller's: observers, hosts' code, receivers of what others wait for, too."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from pagedcore.shown import shown

QUIET_S = 60.0
"""After an error of one function no other of its type is logged for so long."""

MAX_QUIET = 1024
"""Functions and types of their errors that are remembered."""

logger = logging.getLogger(__name__)


class Guard:
    """Calls functions and lets nothing out that they raise. May be used from any thread.

    `SystemExit` and its like belong to the main thread, where they get out; another thread would end by them, and others wait for it.
    """

    def __init__(self, failure: str) -> None:
        """`failure` is a sentence for the log: what could not be done."""
        self._failure = failure
        self._quiet_until_s: dict[tuple[type, str, int], float] = {}

    def __call__(self, function: Callable[..., object], *arguments: object) -> bool:
        """False where the function raised."""
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001  it belongs to nobody here
            self._catch(error, function)
            return False
        return True

    def each(self, function: Callable[[Any], object], items: Iterable[Any]) -> None:
        """Call the function with each item, whichever of them it fails with."""
        rest = iter(list(items))
        is_over = False
        while not is_over:
            try:
                for item in rest:
                    function(item)
                is_over = True
            except BaseException as error:  # noqa: BLE001  it belongs to nobody here
                self._catch(error, function)

    def tell(self, error: BaseException, function: Callable[..., object]) -> None:
        """Log the error of a function, unless one of its type was logged within the last minute."""
        now_s, quiet_until_s = time.monotonic(), self._quiet_until_s
        key = (type(error), getattr(function, "__qualname__", ""), id(getattr(function, "__self__", function)))
        if now_s < quiet_until_s.get(key, now_s):
            return
        if len(quiet_until_s) >= MAX_QUIET:
            quiet_until_s.clear()
        quiet_until_s[key] = now_s + QUIET_S
        logger.error("%s What failed: %s", self._failure, shown(function), exc_info=error)

    def _catch(self, error: BaseException, function: Callable[..., object]) -> None:
        if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
            raise error
        self.tell(error, function)
