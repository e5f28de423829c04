"""What waits for the engine thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, TypeVar

from pagedcore.errors import EngineClosedError
from pagedcore.messages import AddRequest, InboxMessage, failed_update
from pagedcore.outboxes import Outbox

T = TypeVar("T")

Item = tuple[Literal["message", "call", "wake"], Any, Any]
"""("message", message, outbox), ("call", function, future) or ("wake", None, None)."""


class Inbox:
    """Owns the items that other threads leave for the engine thread. Each is taken once, or refused."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._refusal: EngineClosedError | None = None

    def put_message(self, message: InboxMessage, outbox: Outbox | None) -> None:
        self._put(("message", message, outbox))

    def put_call(self, function: Callable[[], T]) -> Future[T]:
        """The future has what the function returns or raises."""
        future: Future[T] = Future()
        self._put(("call", function, future))
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

    def refuse(self, error: EngineClosedError) -> None:
        """Answer what waits with the error; from now on whoever puts something in does this himself."""
        self._refusal = error
        while True:
            try:
                kind, subject, answer = self._items.get_nowait()
            except queue.Empty:
                return
            if kind == "call":
                fulfil(answer, partial(_raise, error))
            elif isinstance(subject, AddRequest):
                answer([failed_update(subject.request_id, error)])

    def _put(self, item: Item) -> None:
        self._items.put(item)
        if self._refusal is not None:  # the thread has looked for the last time, so this one looks itself
            self.refuse(self._refusal)


def fulfil(future: Future[Any], function: Callable[[], Any]) -> None:
    """Give the future what the function returns or raises, unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001  it belongs to whoever called
        future.set_exception(error)


def _raise(error: Exception) -> None:
    raise error
