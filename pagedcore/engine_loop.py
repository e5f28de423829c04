"""The engine thread: schedule, submit, commit, emit. Everything reaches it as a message and leaves it as a message."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pagedcore.client import ModelInfo
from pagedcore.config import EngineConfig, EnginePlan
from pagedcore.core.scheduler import Scheduler
from pagedcore.core.step import PendingStep, Runner, StepPlan
from pagedcore.errors import EngineClosedError, EngineError, PagedCoreError, RequestError, StepFailedError
from pagedcore.messages import AbortRequest, AddRequest, FinishRequest, InboxMessage, RequestUpdate
from pagedcore.observe.recorder import Recorder
from pagedcore.observe.stats import StatsSnapshot
from pagedcore.outputs import FinishReason, Status

Outbox = Callable[[list[RequestUpdate]], None]
"""Takes one step's updates of its requests. Called on the engine thread: hand them on and return."""

T = TypeVar("T")

MAX_CONSECUTIVE_FAILURES = 3
"""Failed steps in a row after which the engine gives up: the device is not coming back by itself."""

IDLE_FLUSH_S = 1.0
"""An idle engine wakes this often to move the windows of its gauges on."""

_live_loops: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What one engine is made of. `build_engine` makes the real ones; tests bring a fake runner."""

    plan: EnginePlan
    info: ModelInfo
    scheduler: Scheduler
    runner: Runner
    recorder: Recorder


class _InFlight(NamedTuple):
    """A step that was handed to the device, and when."""

    plan: StepPlan
    pending: PendingStep
    submitted_s: float


class EngineLoop:
    """Owns the engine thread, its inbox and the outbox of each request in flight.

    `submit` and `call` may be used from any thread. A failed step ends the requests it computed and no other; a fault in
    the scheduler itself ends all of them, since its state is then unknown.
    """

    def __init__(self, parts: EngineParts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.plan = parts.plan
        self.info = parts.info
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._recorder = parts.recorder
        self._clock = clock
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._outboxes: dict[str, Outbox] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._depth = 2 if parts.plan.overlap else 1
        self._submitted_s: float | None = None  # of the step committed last
        self._num_failures = 0
        self._closing = False
        self._fatal: PagedCoreError | None = None
        self._records = False
        self._inbox_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="pagedcore-engine", daemon=True)
        _live_loops.add(self)

    # ---- any thread

    def start(self) -> None:
        """Start the thread; work submitted earlier is done then."""
        self._thread.start()

    def submit(self, message: InboxMessage, outbox: Outbox | None = None) -> None:
        """Hand a message to the engine thread. An `AddRequest` needs the outbox of its updates.

        Raises `EngineClosedError` when the engine is closed or has failed for good.
        """
        self._put(("message", message, outbox))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine thread between two steps."""
        future: Future[T] = Future()
        self._put(("call", function, future))
        return future

    def _put(self, item: tuple[Any, ...]) -> None:
        with self._inbox_lock:  # nothing slips in behind the last look at the inbox
            self.raise_if_closed()
            self._inbox.put(item)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._fatal is None and not self._closing

    @property
    def is_recording(self) -> bool:
        return self._records

    def start_recording(self) -> None:
        """Count from now on: what ran before (the warm-up) is no traffic."""
        self.call(self._start_recording).result()

    def pause_recording(self) -> None:
        """Count nothing until `start_recording`."""
        self.call(self._pause_recording).result()

    def stats(self) -> StatsSnapshot:
        return self._recorder.stats()

    def flush_metrics(self) -> None:
        self._recorder.flush()

    def check(self) -> None:
        """Raise AssertionError where an owner's state contradicts itself; changes nothing."""
        self.call(self._scheduler.check_invariants).result()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block without an owner; False when running requests still hold shared ones."""
        return self.call(self._scheduler.reset_prefix_cache).result()

    def check_request(self, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Raise what adding such a request would raise for its size; changes nothing."""
        self._scheduler.check(num_prompt_tokens, max_tokens)

    def join(self, timeout_s: float) -> None:
        """Wait for the engine thread to end by itself."""
        self._thread.join(timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """End every request as aborted, stop the thread and give the device memory back. May be called twice."""
        with self._inbox_lock:
            if self._closing:
                return
            self._closing = True
            self._inbox.put(("close",))
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        self._recorder.flush()
        self._recorder.close()
        self._runner.close()

    def raise_if_closed(self) -> None:
        """Raise `EngineClosedError` when the engine is closed or has failed for good."""
        if self._fatal is not None:
            raise EngineClosedError(f"The engine stopped after a failure: {self._fatal} Start a new engine.")
        if self._closing:
            raise EngineClosedError("The engine is closed and takes no more requests; start a new engine.")

    # ---- engine thread

    def _run(self) -> None:
        while not self._closing:
            try:
                self._take_inbox()
                if not self._closing:
                    self._step()
            except Exception as error:  # noqa: BLE001  the engine loop's edge: the scheduler's state is unknown now
                self._fatal = EngineError(f"The engine loop failed: {type(error).__name__}: {error}")
                self._fatal.__cause__ = error
                break
        self._end_all(self._fatal)

    def _take_inbox(self) -> None:
        """Take every waiting item; block for the first when there is nothing to do."""
        block, timeout_s = self._idle_wait()
        try:
            while True:
                item = self._inbox.get(block=block, timeout=timeout_s)
                block, timeout_s = False, None
                self._take(item)
                if item[0] == "close":
                    return
        except queue.Empty:
            return

    def _idle_wait(self) -> tuple[bool, float | None]:
        """(block, timeout in s): with no work wait for a message, in a batch window until it ends."""
        if self._in_flight:
            return False, None
        if not self._scheduler.has_work:
            self._recorder.flush()
            return True, IDLE_FLUSH_S
        wake_s = self._scheduler.next_wake_s(self._clock())
        return (False, None) if wake_s is None else (True, max(wake_s - self._clock(), 0.0))

    def _take(self, item: tuple[Any, ...]) -> None:
        if item[0] == "message":
            self._handle(item[1], item[2])
        elif item[0] == "call":
            _fulfil(item[2], item[1])

    def _handle(self, message: InboxMessage, outbox: Outbox | None) -> None:
        now_s = self._clock()
        if isinstance(message, AddRequest):
            assert outbox is not None, "an AddRequest needs an outbox"
            self._add(message, outbox, now_s)
        elif isinstance(message, AbortRequest):
            self._scheduler.abort(message.request_id, now_s)
        elif isinstance(message, FinishRequest):
            self._scheduler.finish(message.request_id, message.num_tokens, message.stop_reason, now_s)

    def _add(self, message: AddRequest, outbox: Outbox, now_s: float) -> None:
        try:
            self._scheduler.add(message, now_s)
            self._outboxes[message.request_id] = outbox
        except RequestError as error:
            outbox([RequestUpdate(request_id=message.request_id, new_token_ids=[], finish_reason="error", status="rejected", error=error)])

    def _step(self) -> None:
        """One turn of the engine: plan ahead as far as allowed, then commit the oldest step."""
        plan = self._scheduler.schedule(self._clock()) if len(self._in_flight) < self._depth else None
        if plan is not None:
            self._submit(plan)
        if self._in_flight and (plan is None or len(self._in_flight) >= self._depth):
            self._commit_oldest()
        self._emit()

    def _submit(self, plan: StepPlan) -> None:
        try:
            submitted_s = self._clock()
            self._in_flight.append(_InFlight(plan, self._runner.submit(plan), submitted_s))
        except Exception as error:  # noqa: BLE001  whatever the device raises ends this step's requests only
            self._fail_in_flight(error, plan)

    def _commit_oldest(self) -> None:
        plan, pending, self._submitted_s = self._in_flight.popleft()
        try:
            result = pending.result()
        except Exception as error:  # noqa: BLE001  whatever the device raises ends this step's requests only
            self._fail_in_flight(error, plan)
            return
        self._num_failures = 0
        self._scheduler.commit(plan, result, self._clock())

    def _fail_in_flight(self, error: Exception, plan: StepPlan) -> None:
        """The step of `plan` failed: steps submitted after it read its tokens, so they fail with it."""
        later = [plan, *(step.plan for step in self._in_flight)]
        if self._in_flight and self._in_flight[0].plan.step_id < plan.step_id:
            later = [plan]  # submit of the newest failed; older steps in flight are well and are committed first
            while self._in_flight:
                self._commit_oldest()
        else:
            _wait_for_all(step.pending for step in self._in_flight)
            self._in_flight.clear()
        failure = StepFailedError(f"Step {plan.step_id} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        for failed in later:
            self._scheduler.fail(failed, failure, self._clock())
        self._num_failures += 1
        if self._num_failures >= MAX_CONSECUTIVE_FAILURES:
            raise failure

    def _emit(self) -> None:
        """Record what happened, then hand each outbox its updates."""
        events = self._scheduler.take_events()
        if self._records:
            events.submitted_s = self._submitted_s if events.step_id is not None else None
            self._recorder.record(events)
            self._recorder.maybe_flush(events.now_s)
        batches: dict[Outbox, list[RequestUpdate]] = {}
        for update in self._scheduler.take_updates():
            if update.cache is not None and self._records:
                update.cache = self._recorder.complete(update.cache, update.request_id)
            outbox = self._outboxes.get(update.request_id)
            if outbox is None:
                continue
            if update.finish_reason is not None:
                del self._outboxes[update.request_id]
            batches.setdefault(outbox, []).append(update)
        for outbox, updates in batches.items():
            outbox(updates)

    def _pause_recording(self) -> None:
        self._emit()
        self._records = False

    def _start_recording(self) -> None:
        self._scheduler.take_events()
        self._records = True

    def _end_all(self, failure: PagedCoreError | None) -> None:
        """Every request still here gets its one last update; then nothing is in flight."""
        _wait_for_all(step.pending for step in self._in_flight)
        self._in_flight.clear()
        if failure is None:
            self._abort_all()
        status: Status = "aborted" if failure is None else "error"
        reason: FinishReason = "abort" if failure is None else "error"
        error = failure or EngineClosedError("The engine was closed while this request ran; send it again.")
        for request_id, outbox in list(self._outboxes.items()):
            outbox([RequestUpdate(request_id=request_id, new_token_ids=[], finish_reason=reason, status=status, error=error)])
        self._outboxes.clear()
        self._refuse_inbox(error)

    def _abort_all(self) -> None:
        for request_id in list(self._outboxes):
            self._scheduler.abort(request_id, self._clock())
        self._emit()

    def _refuse_inbox(self, error: PagedCoreError) -> None:
        with self._inbox_lock:
            items = [self._inbox.get() for _ in range(self._inbox.qsize())]
        for item in items:
            if item[0] == "call":
                item[2].set_exception(error)
            elif item[0] == "message" and isinstance(item[1], AddRequest):
                item[2](
                    [RequestUpdate(request_id=item[1].request_id, new_token_ids=[], finish_reason="error", status="error", error=error)]
                )


def build_engine(config: EngineConfig, *, progress: Callable[[int, int], None] | None = None) -> EngineLoop:
    """Find the model, load it, size the pool, and make an engine that is ready to start.

    Raises `ModelSourceError` or `CheckpointError` for the model, `ConfigError` for settings that cannot work here.
    """
    from pagedcore.engine_build import build_parts

    return EngineLoop(build_parts(config, progress=progress))


def _fulfil(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001  it belongs to whoever called
        future.set_exception(error)


def _wait_for_all(pending_steps: Iterable[PendingStep]) -> None:
    for pending in pending_steps:
        try:
            pending.result()
        except Exception:  # noqa: BLE001  the first failure is the one that is reported
            continue


@atexit.register
def _close_all() -> None:
    for loop in list(_live_loops):
        loop.close(timeout_s=5.0)
