"""Engines end with the process that made them, and a forked child has none."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from contextlib import ExitStack
from typing import Any

import pytest

from pagedcore import process_endings
from pagedcore.errors import EngineClosedError
from pagedcore.process_endings import belong_to_process, close_living, disown_living
from support.core_builders import make_request
from support.remote_engines import Hosted, connected, run


class Living:
    """Writes down what becomes of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        belong_to_process(self)

    def close(self, timeout_s: float) -> None:
        self.log.append(f"close {self.name}")

    def disown(self) -> None:
        self.log.append(f"disown {self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where nothing lives but what the test makes."""
    monkeypatch.setattr(process_endings, "_living", weakref.WeakValueDictionary())
    return []


def test_what_was_made_last_is_closed_first_and_what_is_forgotten_is_not(log: list[str]) -> None:
    one, two, three = (Living(name, log) for name in ("one", "two", "three"))
    del two
    close_living()
    assert log == ["close three", "close one"]
    assert (one.name, three.name) == ("one", "three")


def test_a_forked_child_disowns_all_and_has_nothing_to_close_at_its_end(log: list[str]) -> None:
    made = [Living(name, log) for name in ("one", "two")]
    disown_living()
    close_living()
    assert log == ["disown one", "disown two"]
    assert len(made) == 2


def hold(lock: Any, is_held: threading.Event, may_go: threading.Event) -> None:
    with lock:
        is_held.set()
        may_go.wait(60)


def is_refused(engine: Any) -> bool:
    try:
        engine.loop.submit(make_request("a", [1]), lambda _: None)
    except EngineClosedError as error:
        engine.close_sync()
        return "forked from" in str(error)
    return False


def test_a_forked_child_waits_for_no_lock_that_another_thread_had(one: Hosted) -> None:
    with connected(one) as front, ExitStack() as last:
        for lock in (front.loop._lock, one.built.loop._start_lock):
            is_held, may_go = threading.Event(), threading.Event()
            holder = threading.Thread(target=hold, args=(lock, is_held, may_go))
            holder.start()
            last.callback(holder.join)
            last.callback(may_go.set)
            assert is_held.wait(60)
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(60)  # ends it if it waits
                os._exit(7 if is_refused(front) and is_refused(one.built.engine) else 1)
            finally:
                os._exit(2)
        status = os.waitpid(pid, 0)[1]
        last.close()
        assert os.waitstatus_to_exitcode(status) == 7
        assert run(front, [1]).status == "completed"
