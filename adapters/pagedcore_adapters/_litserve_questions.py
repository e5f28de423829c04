"""Operators' questions between API servers and workers: asked over the control queues, answered over the transport."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pagedcore.errors import EngineClosedError, NoAnswerError, PagedCoreError

ANSWER_TIMEOUT_S = 5.0
NUM_THREADS = 4

logger = logging.getLogger(__name__)

Content = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """One question to one worker. `number` is unique in its API server."""

    number: int
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker says to the question of this number: the content, or the error that it met."""

    number: int
    content: Content | PagedCoreError


class Asker:
    """Owns the questions of one API server that wait for their answers. Used on its event loop only."""

    def __init__(self, send: Callable[[int, Question], None], *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """`send` takes a question to a worker. Raises what it raises."""
        self._send = send
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[int, asyncio.Future[Content]]] = {}

    async def ask(self, worker_ids: Sequence[int], name: str, arguments: dict[str, Any]) -> list[Content]:
        """The answer of each worker, in order.

        Raises the error that a worker met, `EngineClosedError` when one is lost, `NoAnswerError` when one takes too long.
        """
        return list(await asyncio.gather(*(self._ask_one(worker_id, name, arguments) for worker_id in worker_ids)))

    def receive(self, answer: Answer) -> None:
        """Give an answer to whoever waits for it; one that comes too late is dropped."""
        _, future = self._waiting.pop(answer.number, (0, None))
        if future is None or future.done():
            return
        if isinstance(answer.content, PagedCoreError):
            future.set_exception(answer.content)
        else:
            future.set_result(answer.content)

    def lose(self, worker_id: int) -> None:
        """A worker has ended: what it was asked has no answer."""
        for number, (asked_id, _) in list(self._waiting.items()):
            if asked_id == worker_id:
                self.receive(Answer(number, EngineClosedError(f"Worker process {worker_id} has ended.")))

    async def _ask_one(self, worker_id: int, name: str, arguments: dict[str, Any]) -> Content:
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = worker_id, future
        try:
            self._send(worker_id, Question(number, name, arguments))
            async with asyncio.timeout(self._timeout_s):
                return await future
        except TimeoutError:
            raise NoAnswerError(f"Worker process {worker_id} did not answer {name!r} within {self._timeout_s:g} s.") from None
        finally:
            self._waiting.pop(number, None)


class Answerer:
    """Owns the threads of a worker process that answer questions, so that none holds up the requests behind it, nor a slow one
    (the advice) the others."""

    def __init__(self, inspect: Callable[..., list[Content]], send: Callable[[int, Answer], None]) -> None:
        self._inspect = inspect
        self._send = send
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pagedcore-answers")

    def take(self, queue_id: int, question: Question) -> None:
        """Answer an API server, a little later."""
        self._threads.submit(self._answer, queue_id, question).add_done_callback(_log_failure)

    def close(self) -> None:
        """Answer no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _answer(self, queue_id: int, question: Question) -> None:
        content: Content | PagedCoreError
        try:
            content = self._inspect(question.name, **question.arguments)[0]
        except PagedCoreError as error:
            content = error
        with suppress(EOFError, OSError):  # nobody is left to hear it
            self._send(queue_id, Answer(question.number, content))


def _log_failure(future: Future[None]) -> None:
    if not future.cancelled() and future.exception() is not None:
        logger.error("A question was not answered.", exc_info=future.exception())
