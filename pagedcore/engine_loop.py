"""The engine thread: schedule, submit, commit, emit. Everything reaches it as a message and leaves it as a message."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar, cast

from pagedcore.advice.advisor import Advisor
from pagedcore.client import ModelInfo
from pagedcore.config import EnginePlan
from pagedcore.core.block_pool import BlockPool
from pagedcore.core.events import Finished
from pagedcore.core.scheduler import Scheduler
from pagedcore.core.step import PendingStep, Runner, StepPlan
from pagedcore.engine_books import EngineBooks
from pagedcore.errors import EngineClosedError, EngineError, PagedCoreError, RequestError, StepFailedError
from pagedcore.garbage import GarbageHold
from pagedcore.grammar.grammars import Grammars, prepare
from pagedcore.inbox import Inbox, fulfil
from pagedcore.messages import AbortRequest, AddRequest, InboxMessage, failed_update
from pagedcore.observe.recorder import Recorder
from pagedcore.observe.stats import StatsSnapshot
from pagedcore.outboxes import Outbox, Outboxes, hand_over
from pagedcore.process_endings import belong_to_process
from pagedcore.tracing.tracer import Tracer

T = TypeVar("T")

MAX_CONSECUTIVE_FAILURES = 3
"""Failed steps in a row after which the engine gives up: the device is not coming back by itself."""

MAX_GATHERING_S = 0.05
"""Longest that the engine waits for requests that come together; others wait with it."""

LENDING_S = 1.0
"""How long whoever gives up on the engine thread waits for it to be with the device, where its requests can be ended in order."""

IDLE_FLUSH_S = 1.0
"""An idle engine wakes this often to move the windows of its gauges on."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What one engine is made of. `build_engine` makes the real ones; tests bring a fake runner."""

    plan: EnginePlan
    info: ModelInfo
    scheduler: Scheduler
    runner: Runner
    recorder: Recorder
    grammars: Grammars | None = None
    """None refuses structured_outputs."""
    tracer: Tracer | None = None
    """None is one that only remembers."""


class _InFlight(NamedTuple):
    """A step that was handed to the device, and when."""

    plan: StepPlan
    pending: PendingStep
    submitted_s: float


class EngineLoop:
    """Owns the engine thread, and the steps that are in flight.

    `submit` and `call` may be used from any thread. A failed step ends the requests it computed and no other; a fault in
    the scheduler itself ends all of them, since its state is then unknown. The device belongs to the thread, which gives it
    back when it ends. A forked child has no such thread: there every call is refused.
    """

    def __init__(self, parts: EngineParts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.plan = parts.plan
        self.info = parts.info
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self.grammars = parts.grammars
        self._recorder = parts.recorder
        self.tracer = parts.tracer or Tracer(parts.recorder, clock=clock)
        self.advisor = Advisor(parts.recorder, parts.scheduler.limits, clock=clock)
        self._clock = clock
        self._books = EngineBooks(parts.recorder)
        self._inbox = Inbox(self._books.receive)
        self._outboxes = Outboxes()
        self._in_flight: deque[_InFlight] = deque()
        self._depth = 2 if parts.plan.overlap else 1
        self._submitted_s: float | None = None  # of the step committed last
        self._num_failures = 0
        self._closing = False
        self._fatal: PagedCoreError | None = None
        self._refusal: str | None = None
        self._garbage = GarbageHold()
        self._thread = threading.Thread(target=self._run, name="pagedcore-engine", daemon=True)
        self._start_lock = threading.RLock()
        self._state_lock = threading.Lock()
        """Held by the engine thread but while it is with the device: who has it may end the requests."""
        self._is_over = threading.Event()
        belong_to_process(self)

    # ---- any thread

    def start(self) -> None:
        """Start the thread; work submitted earlier is done then. Raises `EngineClosedError` after `close`."""
        with self._start_lock:
            self.raise_if_closed()
            self._thread.start()

    def submit(self, message: InboxMessage, outbox: Outbox | None = None) -> None:
        """Hand a message to the engine thread. An `AddRequest` needs the outbox of its updates; other messages with an outbox
        reach only requests of that outbox.

        Raises `EngineClosedError` when the engine is closed or has failed for good.
        """
        assert outbox is not None or not isinstance(message, AddRequest), "an AddRequest needs an outbox"
        self.raise_if_closed()
        fault = self._fault_of_form(message) if isinstance(message, AddRequest) else None
        if fault is None:
            self._inbox.put_message(message, outbox)
        else:
            self._inbox.put_fault(cast("AddRequest", message), fault, cast("Outbox", outbox))

    def _fault_of_form(self, message: AddRequest) -> PagedCoreError | None:
        """Compile what the output must follow, here, so that the engine thread never waits for it. A front in this process has done it."""
        if message.params.structured_outputs is None:
            return None
        try:
            prepare(self.grammars, message.params.structured_outputs)
        except PagedCoreError as error:
            return error
        return None

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine thread between two steps."""
        self.raise_if_closed()
        return self._inbox.put_call(function)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._refusal is None

    @property
    def recorder(self) -> Recorder:
        """All that was counted; its questions may be asked from any thread."""
        return self._recorder

    @property
    def pool(self) -> BlockPool:
        """The KV pool; beside the engine thread nobody may do more than `glimpse`."""
        return self._scheduler.pool

    @property
    def is_recording(self) -> bool:
        return self._books.is_counting

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """What is submitted inside is planned together: the engine waits for the end of the block, or `MAX_GATHERING_S`.

        Raises `EngineClosedError` when the engine is closed.
        """
        is_complete = threading.Event()
        self.call(partial(is_complete.wait, MAX_GATHERING_S))
        try:
            yield
        finally:
            is_complete.set()

    def start_recording(self) -> None:
        """Count from now on: what came before (the warm-up) is no traffic, also where it still runs."""
        self.call(self._start_recording).result()
        self._garbage.take()

    def pause_recording(self) -> None:
        """Count nothing that comes until `start_recording`, neither requests nor steps; what has come before is counted to its end.

        What belongs to steps and not to requests is not counted in a pause, whoever it was done for: gaps between tokens, sampled tokens,
        blocks acquired, evicted and swapped, and the tokens and seconds of misses that could have been avoided.
        """
        was_recording = self.is_recording
        try:
            self.call(self._pause_recording).result()
        except BaseException:  # an interrupted caller: it pauses all the same, and nobody would start it again
            if was_recording and not self._closing:
                self.call(self._start_recording)
            raise

    def stats(self) -> StatsSnapshot:
        return self._recorder.stats()

    def flush_metrics(self) -> None:
        self._recorder.flush()

    def count_lost(self, ends: Sequence[Finished]) -> None:
        """Requests that an engine before this one took with it when it died: they have arrived and ended in the books of this one.

        Raises `EngineClosedError` when the engine is closed; the books then have neither.
        """
        self.call(partial(self._books.take_lost, ends))

    def check(self) -> None:
        """Raise AssertionError where an owner's state contradicts itself; changes nothing."""
        self.call(self._scheduler.check_invariants).result()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block without an owner; False when running requests still hold shared ones."""
        return self.call(lambda: self._scheduler.reset_prefix_cache(self._clock())).result()

    def check_request(self, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Raise what adding such a request would raise for its size; changes nothing."""
        self._scheduler.check(num_prompt_tokens, max_tokens)

    def join(self, timeout_s: float) -> None:
        """Wait for the engine thread to end by itself."""
        self._thread.join(timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """End every request as aborted, stop the thread and give the device memory back. May be called twice, from any thread.

        Requests that the engine thread has not seen yet end with an error. When the device does not answer in time, all do, and the
        thread is left behind.
        """
        if self._refusal is None:
            self._refusal = "The engine is closed and takes no more requests; start a new engine."
        self._closing = True
        self._inbox.wake()
        with self._start_lock:
            if self._thread.ident is None and not self._is_over.is_set():
                self._run()
        if threading.current_thread() is not self._thread and not self._is_over.wait(timeout_s):
            self._abandon(timeout_s)

    def raise_if_closed(self) -> None:
        """Raise `EngineClosedError` when the engine is closed or has failed for good."""
        if self._refusal is not None:
            raise EngineClosedError(self._refusal)

    def raise_if_away(self) -> None:
        """The same: an engine in this process is there, or gone. One in another process may be away for a while."""
        self.raise_if_closed()

    def disown(self) -> None:
        """In a forked child: refuse everything, wait for nothing and leave the parent's device alone."""
        self._refusal = "The engine belongs to the process that this one was forked from; start an engine here, or fork before making it."
        self._is_over, self._start_lock = threading.Event(), threading.RLock()  # another thread may have held theirs
        self._is_over.set()

    # ---- engine thread

    def _run(self) -> None:
        with self._state_lock:
            try:
                while not self._closing and self._fatal is None:
                    self._take_inbox()
                    if not self._closing:
                        self._step()
                self._end_all()
            except Exception as error:  # the engine loop's edge: the scheduler's state is unknown now
                logger.critical("The engine loop failed.", exc_info=error)
                self._fail_for_good(EngineError(f"The engine loop failed: {type(error).__name__}: {error}"), error)
                with suppress(Exception):  # as far as it is well, it knows best how far its requests have come
                    self._end_all()
            finally:
                self._leave()

    def _take_inbox(self) -> None:
        """Take what waits; wait for the first item when there is nothing to do."""
        block, timeout_s = self._idle_wait()
        for kind, subject, answer in self._inbox.take(block=block, timeout_s=timeout_s):
            if kind == "message":
                self._handle(subject, answer)
            elif kind == "fault":
                request, fault = subject
                self._refuse(request, fault, answer)
            elif kind == "call":
                fulfil(answer, subject)

    def _idle_wait(self) -> tuple[bool, float | None]:
        """(block, timeout in s): with no work wait for a message, in a batch window until it ends."""
        if self._in_flight:
            return False, None
        if not self._scheduler.has_work:
            self._books.flush()
            return True, IDLE_FLUSH_S
        wake_s = self._scheduler.next_wake_s(self._clock())
        return (False, None) if wake_s is None else (True, max(wake_s - self._clock(), 0.0))

    def _handle(self, message: InboxMessage, outbox: Outbox | None) -> None:
        now_s = self._clock()
        if isinstance(message, AddRequest):
            self._add(message, cast("Outbox", outbox), now_s)
        elif outbox is not None and not self._outboxes.owns(outbox, message.request_id):
            return  # it has just ended, or the id is another front's
        elif isinstance(message, AbortRequest):
            self._scheduler.abort(message.request_id, now_s)
        else:
            self._scheduler.finish(message.request_id, message.num_tokens, message.stop_reason, now_s)

    def _add(self, message: AddRequest, outbox: Outbox, now_s: float) -> None:
        if message.request_id in self._outboxes:
            self._emit()  # it may have ended in this turn: its last update goes to the front that had it
        self._books.take(message)
        is_new = message.request_id not in self._outboxes
        if is_new:
            self._outboxes.open(message.request_id, outbox)  # before anything can go wrong, so that it is told
        try:
            self._scheduler.add(message, now_s)
        except RequestError as error:
            if is_new:
                self._outboxes.close(message.request_id)
            self._outboxes.refuse(message.request_id, outbox, error)

    def _refuse(self, request: AddRequest, fault: PagedCoreError, outbox: Outbox) -> None:
        """A request with a fault that need not be shown to the scheduler."""
        self._books.refuse(request, fault, self._clock())
        self._outboxes.refuse(request.request_id, outbox, fault)

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
            with self._with_device():
                pending = self._runner.submit(plan)
            self._in_flight.append(_InFlight(plan, pending, submitted_s))
        except Exception as error:  # noqa: BLE001  whatever the device raises ends this step's requests only
            self._fail_in_flight(error, plan)

    def _commit_oldest(self) -> None:
        plan, pending, self._submitted_s = self._in_flight.popleft()
        try:
            with self._with_device():
                result = pending.result()
        except Exception as error:  # noqa: BLE001  whatever the device raises ends this step's requests only
            self._fail_in_flight(error, plan)
            return
        self._num_failures = 0
        self._scheduler.commit(plan, result, self._clock())

    def _fail_in_flight(self, error: Exception, plan: StepPlan) -> None:
        """The step of `plan` failed: steps submitted after it read its tokens, so they fail with it."""
        logger.error("Step %d failed.", plan.step_id, exc_info=error)
        traceback.clear_frames(error.__traceback__)  # its callers may keep the error, which would keep device memory
        later = [plan, *(step.plan for step in self._in_flight)]
        if self._in_flight and self._in_flight[0].plan.step_id < plan.step_id:
            later = [plan]  # submit of the newest failed; older steps in flight are well and are committed first
            while self._in_flight:
                self._commit_oldest()
        else:
            self._wait_for_device()
        failure = StepFailedError(f"Step {plan.step_id} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        for failed in later:
            self._scheduler.fail(failed, failure, self._clock())
        self._num_failures += 1
        if self._num_failures >= MAX_CONSECUTIVE_FAILURES:
            self._fail_for_good(EngineError(f"{self._num_failures} steps in a row failed, the last one: {failure}"), error)

    def _fail_for_good(self, fatal: EngineError, cause: Exception) -> None:
        fatal.__cause__ = cause
        self._fatal = fatal
        self._refusal = f"The engine has stopped for good: {fatal}. Start a new engine."

    def _emit(self) -> None:
        """Record what happened, then hand each outbox its updates."""
        events = self._scheduler.take_events()
        events.submitted_s = self._submitted_s if events.step_id is not None else None
        self._books.record(events)
        for request_id, outbox in self._outboxes.deliver(self._scheduler.take_updates(), self._books.complete):
            self._inbox.put_message(AbortRequest(request_id), outbox)
        self._outboxes.tell_refused()  # after they were counted

    def _pause_recording(self) -> None:
        self._emit()
        self._books.pause()

    def _start_recording(self) -> None:
        self._emit()
        self._books.start()

    @contextmanager
    def _with_device(self) -> Iterator[None]:
        """The engine thread may not come back from inside."""
        self._state_lock.release()
        try:
            yield
        finally:
            self._state_lock.acquire()

    # ---- the end

    def _wait_for_device(self) -> None:
        """Nothing is in flight afterwards. What failed was reported already, or ends with the engine."""
        while self._in_flight:
            try:
                with self._with_device():
                    self._in_flight.popleft().pending.result()
            except Exception:  # noqa: BLE001  the first failure is the one that is reported
                continue

    def _end_all(self) -> None:
        """Every request that is still here ends in the books: aborted, or failed when the device did."""
        self._wait_for_device()
        self._scheduler.end_all(self._clock(), self._fatal)
        self._emit()

    def _leave(self) -> None:
        """Nobody is left waiting, and the device memory goes back, whatever goes wrong on the way."""
        with ExitStack() as last:
            last.callback(self._is_over.set)
            last.callback(self._garbage.release)
            last.callback(self._runner.close)
            last.callback(self._recorder.close)
            last.callback(self.tracer.close)
            last.callback(self.advisor.close)
            last.callback(self._wait_for_device)
            self._settle(self._fatal or EngineClosedError("The engine was closed while this request ran; send it again."))

    def _abandon(self, timeout_s: float) -> None:
        """The thread hangs in a device call. Callers are told; the memory cannot be given back."""
        error = EngineClosedError(f"The engine was closed and its device did not answer within {timeout_s:g} s.")
        logger.error("%s Its thread and its memory are left behind.", error)
        if self._state_lock.acquire(timeout=LENDING_S):
            try:
                self._scheduler.end_all(self._clock(), error)
                self._emit()
            finally:
                self._state_lock.release()
        self._settle(error)

    def _settle(self, error: PagedCoreError) -> None:
        """All who are still here end by the error, and those whom nobody has seen yet as refused: counted first, then told.

        What comes later is not recorded any more. May be called twice, from any thread.
        """
        refusal = EngineClosedError(self._refusal or "The engine is closed.")
        with ExitStack() as last:  # each is told, whatever one part raises
            last.callback(self._outboxes.end_all, error)
            waiting = self._inbox.refuse(refusal)
            for request, outbox in reversed(waiting):
                last.callback(hand_over, outbox, [failed_update(request.request_id, refusal)])
            self._books.close([request for request, _ in waiting], self._clock())
