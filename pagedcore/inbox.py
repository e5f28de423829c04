"""What waits for the engine thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar

from pagedcore.errors import EngineClosedError, PagedCoreError
from pagedcore.messages import AddRequest, InboxMessage
from pagedcore.outboxes import Outbox

T = TypeVar("T")

Item = tuple[Literal["message", "fault", "call", "wake"], Any, Any]
"""("message", message, outbox), ("fault", (request, what is wrong with it), outbox), ("call", function, future) or ("wake", None, None)."""


class Inbox:
    """Owns the items that other threads leave for the engine thread. Each is taken once, or given back by `refuse`.

    The other methods that put something in raise `EngineClosedError` after `refuse`, with nothing put in.
    """

    def __init__(self, receive: Callable[[AddRequest], AddRequest] = lambda request: request) -> None:
        """`receive` is given each request that is put in, one at a time, and gives what the engine thread takes."""
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._receive = receive
        self._refusal: EngineClosedError | None = None
        self._lock = threading.RLock()

    def put_message(self, message: InboxMessage, outbox: Outbox | None) -> None:
        """Only a request needs the lock, and waits for it: an abort may come from the garbage collector, under any lock of its thread.

        One that slips in after `refuse` is for nobody.
        """
        if isinstance(message, AddRequest):
            with self._lock:
                self._raise_if_refused()
                self._items.put(("message", self._receive(message), outbox))
        else:
            self._raise_if_refused()
            self._items.put(("message", message, outbox))

    def put_fault(self, request: AddRequest, fault: PagedCoreError, outbox: Outbox) -> None:
        """A request that is to be refused."""
        with self._lock:
            self._raise_if_refused()
            self._items.put(("fault", (self._receive(request), fault), outbox))

    def put_call(self, function: Callable[[], T]) -> Future[T]:
        """The future has what the function returns or raises."""
        future: Future[T] = Future()
        with self._lock:
            self._raise_if_refused()
            self._items.put(("call", function, future))
        return future

    def wake(self) -> None:
        """Let the engine thread look around."""
        self._items.put(("wake", None, None))

    def take(self, *, block: bool, timeout_s: float | None) -> Iterator[Item]:
        """What waits now; with `block` wait for the first item, or `timeout_s`. What comes meanwhile waits for the next time."""
        if not block and self._items.empty():
            return
        try:
            yield self._items.get(block=block, timeout=timeout_s)
            for _ in range(self._items.qsize()):
                yield self._items.get_nowait()
        except queue.Empty:
            return

    def refuse(self, error: EngineClosedError) -> list[tuple[AddRequest, Outbox]]:
        """Take nothing more: calls that wait raise the error, and the requests that wait are given back. From any number of threads."""
        with self._lock:
            self._refusal = error
        requests: list[tuple[AddRequest, Outbox]] = []
        for kind, subject, answer in self._left():
            if kind == "call":
                fulfil(answer, partial(_raise, error))
            elif kind == "fault":
                requests.append((subject[0], answer))
            elif isinstance(subject, AddRequest):
                requests.append((subject, answer))
        return requests

    def _left(self) -> Iterator[Item]:
        with suppress(queue.Empty):
            while True:
                yield self._items.get_nowait()

    def _raise_if_refused(self) -> None:
        if self._refusal is not None:
            raise EngineClosedError(str(self._refusal))


def fulfil(future: Future[Any], function: Callable[[], Any]) -> None:
    """Give the future what the function returns or raises, unless it was cancelled: this thread goes on even from `SystemExit`."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001  it belongs to whoever called
        future.set_exception(error)


def _raise(error: Exception) -> None:
    raise error
