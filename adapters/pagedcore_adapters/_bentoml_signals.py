"""SIGTERM in a worker process of BentoML, whose server closes the service only after the last answer, however long that takes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


def on_terminate(act: Callable[[], object]) -> None:
    """Let SIGTERM call `act` and then what it would have called before. In a thread that gets no signals: nothing."""
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        act()
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, handle)
