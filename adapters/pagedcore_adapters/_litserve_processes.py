"""Signals of a server's main process, and the end of the processes that it started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.managers import SyncManager
from multiprocessing.process import BaseProcess

PARENT_POLL_S = 1.0


@contextmanager
def handler_of_signals(handle: Callable[[int, object], None]) -> Iterator[None]:
    """SIGTERM is what SIGINT is: LitServe leaves its processes behind otherwise. In a thread that gets no signals: nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_if_child() -> None:
    """In a process that the server forked: end, once. Another signal in the middle of that would leave threads without their loop."""
    if multiprocessing.parent_process() is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(0)


def stop_on_signals() -> None:
    """Before `run` of a LitServer of your own: let SIGTERM end it as Ctrl-C does, with all its processes, and each of them quietly.

    LitServe itself leaves its processes behind at SIGTERM. In a thread that gets no signals: nothing.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)


def _interrupt(*_: object) -> None:
    if not _is_manager_of_a_living_server():
        end_if_child()
        raise KeyboardInterrupt


def _is_manager_of_a_living_server() -> bool:
    """The server asks it until its own end, and ends it then. A signal to all would end it before, in the middle of a question."""
    parent, name = multiprocessing.parent_process(), multiprocessing.current_process().name
    return parent is not None and os.getppid() == parent.pid and name.startswith(SyncManager.__name__)


@contextmanager
def blocked_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Processes started inside never see these signals; this one gets them afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # starting it inside would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(manager_pid: int) -> None:
    """Wait for the end of this process' parent, then end this process and the manager: a killed main process takes all along."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "started in a child process only"
    while os.getppid() == parent.pid:  # its sentinel is no help: other children hold it open
        time.sleep(PARENT_POLL_S)
    os.kill(manager_pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGTERM)


def end_processes(processes: Set[BaseProcess], patience_s: float) -> None:
    """End all of them: asked first, killed where that does not help within `patience_s` each."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(patience_s)
        if process.is_alive():
            process.kill()
