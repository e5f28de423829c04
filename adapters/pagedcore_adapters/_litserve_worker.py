"""The worker's side of LitServe: control messages in, one message a step and API server out."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from pagedcore.engine_loop import EngineLoop
from pagedcore.errors import EngineClosedError
from pagedcore.messages import AddRequest, InboxMessage, RequestUpdate, failed_update
from pagedcore.outboxes import Outbox
from pagedcore.remote.lost_requests import lost_ends
from pagedcore.remote.open_requests import OpenRequest
from pagedcore_adapters._litserve_messages import ControlQueue, Reply
from pagedcore_adapters._litserve_questions import Answerer, Question

POLL_S = 0.25
"""An idle worker looks this often whether it should stop, and whether its server and its engine are still there."""
SEND_TIMEOUT_S = 5.0


class WorkerBridge:
    """Owns the way between one engine loop and the API servers; `serve` is the life of a worker process."""

    def __init__(
        self,
        loop: EngineLoop,
        control: ControlQueue,
        send: Callable[[int, Reply], None],
        inspect: Callable[..., list[dict[str, Any]]],
        incarnation: int = 0,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """`inspect` answers operators' questions; `send` may be called from any thread. `look` is called often, by `serve`."""
        self._look = look
        self._incarnation = incarnation
        self._loop = loop
        self._answerer = Answerer(inspect, send)
        self._control = control
        self._send = send
        self._outgoing: queue.SimpleQueue[tuple[int, list[RequestUpdate]] | None] = queue.SimpleQueue()
        self._outboxes: dict[int, Outbox] = {}
        self._num_added = self._num_ended = 0
        self._is_stopping = self._has_sent_all = False
        self._sender = threading.Thread(target=self._forward, name="pagedcore-sender", daemon=True)

    def serve(self) -> None:
        """Until it is told to stop, or the server is gone; the engine is closed then.

        Raises `EngineClosedError`, which says why, when the engine has ended by itself.
        """
        self._sender.start()
        try:
            while self._goes_on() and self._sender.is_alive() and _is_server_alive():
                self._loop.raise_if_closed()
                self._look()
                self._take()
        except (EOFError, OSError):
            return  # the manager is gone, and the server with it
        finally:
            self._loop.close()
            self._answerer.close()
            self._outgoing.put(None)
            self._sender.join(SEND_TIMEOUT_S)

    def stop_when_idle(self) -> None:
        """Let `serve` end once no request is open. For a signal handler: it does nothing else."""
        self._is_stopping = True

    def _goes_on(self) -> bool:
        return not self._is_stopping or self._num_ended < self._num_added

    def _take(self) -> None:
        try:
            sender, message = self._control.get(timeout=POLL_S)
        except queue.Empty:
            return
        if sender.incarnation != self._incarnation:
            self._drop(message)
            return
        queue_id = sender.queue_id
        if isinstance(message, Question):
            self._answerer.take(queue_id, message)
            return
        outbox = self._outboxes.setdefault(queue_id, partial(self._post, queue_id))
        self._num_added += isinstance(message, AddRequest)
        try:
            self._loop.submit(message, outbox)
        except EngineClosedError as error:
            if isinstance(message, AddRequest):
                outbox([failed_update(message.request_id, error)])

    def _drop(self, message: InboxMessage | Question) -> None:
        """It was meant for a process that has ended before it took it: whoever sent it has been told, and nobody has counted it."""
        if isinstance(message, AddRequest) and message.choice_index == 0:
            self._loop.count_lost(lost_ends([OpenRequest(message, list.clear)], time.monotonic()))

    def _post(self, queue_id: int, updates: list[RequestUpdate]) -> None:
        """An outbox, on the engine thread."""
        self._outgoing.put((queue_id, updates))
        self._num_ended += sum(update.finish_reason is not None for update in updates)

    def _forward(self) -> None:
        """Send what the engine posts; steps that piled up meanwhile travel together."""
        try:
            while not self._has_sent_all:
                for queue_id, updates in self._next_batches().items():
                    self._send(queue_id, updates)
        except (EOFError, OSError):
            return  # nobody is left to send to

    def _next_batches(self) -> dict[int, list[RequestUpdate]]:
        batches: dict[int, list[RequestUpdate]] = {}
        item = self._outgoing.get()
        while item is not None:
            queue_id, updates = item
            batches.setdefault(queue_id, []).extend(updates)
            if self._outgoing.empty():
                return batches
            item = self._outgoing.get()
        self._has_sent_all = True
        return batches


def _is_server_alive() -> bool:
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()
