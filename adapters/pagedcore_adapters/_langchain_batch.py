"""Sync batches: each request has a thread that waits for it, and all are aborted together when nobody waits for their end any more."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from typing import Any, Self, TypeVar

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list

from pagedcore import AsyncEngine
from pagedcore.request_stream import LOOK_UP_S

MAX_BATCH_THREADS = 512
"""Most requests that one sync batch keeps in the engine at once."""

R = TypeVar("R")
Config = RunnableConfig | Sequence[RunnableConfig] | None


class Batch:
    """Owns the threads of one batch, and knows the requests that run in them. Left by an exception, Ctrl-C among them, it aborts these
    and waits for no thread: each ends when the engine has said so, in a step.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="pagedcore-batch")
        self._outer = _BATCH.get()
        """The one in whose thread this one is made; leaving that ends this one's requests, too."""
        self._context = copy_context()
        self._context.run(_BATCH.set, self)
        self._lock = threading.Lock()
        self._running: dict[str, AsyncEngine] = {}
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self._abort()
        self._pool.shutdown(wait=error is None, cancel_futures=True)

    def submit(self, work: Callable[..., R], *arguments: Any) -> Future[R]:
        """Do `work` in a thread, with the variables of who made the batch."""
        return self._pool.submit(self._context.copy().run, work, *arguments)

    @contextmanager
    def running(self, request_id: str, engine: AsyncEngine) -> Iterator[None]:
        """Around one request. Raises as `check` does."""
        with self._lock:
            self.check()
            self._running[request_id] = engine
        try:
            with nullcontext() if self._outer is None else self._outer.running(request_id, engine):
                yield
        finally:
            with self._lock:
                del self._running[request_id]

    def check(self) -> None:
        """Raise `CancelledError` when the batch is over."""
        if self._is_over:
            raise CancelledError("The batch that this request is one of was left.")
        if self._outer is not None:
            self._outer.check()

    def _abort(self) -> None:
        with self._lock:
            self._is_over = True
            running = list(self._running.items())
        for request_id, engine in running:
            engine.abort_sync(request_id)


_BATCH: ContextVar[Batch | None] = ContextVar("pagedcore_batch", default=None)


def current_batch() -> Batch | None:
    """The one whose thread this is."""
    return _BATCH.get()


def new_request_id() -> str:
    """As the engine itself makes them."""
    return f"req-{uuid.uuid4().hex}"


def run_at_once(work: Callable[..., R], *arguments: Sequence[Any], max_threads: int = MAX_BATCH_THREADS) -> list[R]:
    """What `work` makes of each set of arguments. The first failure ends the others."""
    if len(arguments[0]) < 2:
        return [work(*each) for each in zip(*arguments, strict=True)]
    with Batch(min(len(arguments[0]), max_threads)) as batch:
        futures = [batch.submit(work, *each) for each in zip(*arguments, strict=True)]
        done = _wait(futures, FIRST_EXCEPTION)
        for future in filter(done.__contains__, futures):
            future.result()
        return [future.result() for future in futures]


def batch(model: Runnable[Any, R], inputs: Sequence[Any], config: Config, *, return_exceptions: bool, **options: Any) -> list[R]:
    """See `Runnable.batch`; all inputs are in the engine at once unless the config sets max_concurrency."""
    invoke, configs, max_threads = _plan(model, inputs, config, return_exceptions, options)
    return run_at_once(invoke, inputs, configs, max_threads=max_threads)


def batch_as_completed(
    model: Runnable[Any, R], inputs: Sequence[Any], config: Config, *, return_exceptions: bool, **options: Any
) -> Iterator[tuple[int, R]]:
    """See `Runnable.batch_as_completed`; leaving it aborts what still runs."""
    invoke, configs, max_threads = _plan(model, inputs, config, return_exceptions, options)
    if not inputs:
        return
    with Batch(min(len(inputs), max_threads)) as batch:
        indices = {batch.submit(invoke, one, config): index for index, (one, config) in enumerate(zip(inputs, configs, strict=True))}
        while indices:
            for future in _wait(indices, FIRST_COMPLETED):
                yield indices.pop(future), future.result()


def _wait(futures: Collection[Future[R]], return_when: str) -> set[Future[R]]:
    """The first of `concurrent.futures.wait`, which sleeps in a lock: it looks up now and then, see `LOOK_UP_S`."""
    while True:
        done, running = wait(futures, timeout=LOOK_UP_S, return_when=return_when)
        if not running or (done and return_when == FIRST_COMPLETED) or any(future.cancelled() or future.exception() for future in done):
            return done


def _plan(
    model: Runnable[Any, R], inputs: Sequence[Any], config: Config, return_exceptions: bool, options: dict[str, Any]
) -> tuple[Callable[[Any, RunnableConfig], R], list[RunnableConfig], int]:
    """How one input is answered, with which config, and in how many threads."""
    configs = get_config_list(config, len(inputs)) if inputs else []

    def invoke(one: Any, config: RunnableConfig) -> Any:
        try:
            return model.invoke(one, config, **options)
        except Exception as error:
            if return_exceptions:
                return error
            raise

    return invoke, configs, (configs[0].get("max_concurrency") if configs else None) or MAX_BATCH_THREADS
