"""An engine that somebody else runs: connecting to its socket, again and again if need be."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from pagedcore.errors import EngineRefusedError, EngineUnreachableError
from pagedcore.remote.address import checked_path, connect_to
from pagedcore.remote.link import Link

WELCOME_TIMEOUT_S = 10.0
FIRST_DELAY_S = 0.05
MAX_DELAY_S = 2.0
ENGINE_START_TIMEOUT_S = 600.0
"""How long a server waits for the engine that it attaches to: both may be started together, and that one may fetch a model first."""


class Attachment:
    """The `LinkSource` of an engine at a path. After a loss it tries until the engine, or another one, is there."""

    is_owner = False

    def __init__(self, path: str | Path, *, timeout_s: float = 0.0) -> None:
        """`timeout_s` is how long the first try may take, for an engine that is still loading. Raises `ConfigError` for the path."""
        self._path = checked_path(path)
        self._timeout_s = timeout_s

    def open(self) -> Link:
        """Raises `EngineUnreachableError` when nobody answers in time, and `EngineRefusedError` at once."""
        deadline_s, delay_s = time.monotonic() + self._timeout_s, FIRST_DELAY_S
        while True:
            try:
                return self._connect()
            except EngineRefusedError:
                raise
            except EngineUnreachableError:
                if time.monotonic() + delay_s > deadline_s:
                    raise
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    def reopen(self, stop: threading.Event) -> Link | None:
        """Try until it works, or the engine there refuses."""
        delay_s = FIRST_DELAY_S
        while not stop.wait(delay_s):
            try:
                return self._connect()
            except EngineRefusedError:
                raise
            except EngineUnreachableError:
                delay_s = min(2 * delay_s, MAX_DELAY_S)
        return None

    def explain_loss(self) -> str:
        return f"The engine at {self._path} has ended the connection."

    outlook = "This process connects again once an engine listens there."

    def close(self, timeout_s: float) -> None:
        """The engine goes on."""

    def _connect(self) -> Link:
        return Link(connect_to(self._path), timeout_s=WELCOME_TIMEOUT_S)
