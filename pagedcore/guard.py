"""Calls whose failure is not their caller's: observers, hosts' code, receivers of what others wait for, too."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Guard:
    """Calls functions and lets nothing out that they raise. The first failure is logged; may be used from any thread."""

    def __init__(self, failure: str) -> None:
        """`failure` is a sentence for the log: what could not be done."""
        self._failure = failure
        self._has_failed = False

    def __call__(self, function: Callable[..., object], *arguments: object) -> bool:
        """False where the function raised."""
        try:
            function(*arguments)
        except Exception as error:  # it belongs to nobody here
            if not self._has_failed:
                logger.error("%s", self._failure, exc_info=error)
            self._has_failed = True
            return False
        return True
