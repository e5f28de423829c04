"""The advisor of a live engine: the engine thread hands it what happened, other threads make sense of it."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from pagedcore.advice.advice import Advice
from pagedcore.advice.costly_prefixes import CostlyPrefix
from pagedcore.advice.prompt import Prompt
from pagedcore.advice.trace import TracedRequest, TraceWriter
from pagedcore.advice.traffic_study import TrafficStudy
from pagedcore.core.events import Admitted, Arrived, BlocksForgotten, Event, Finished, StepEvents
from pagedcore.core.limits import SchedulerLimits
from pagedcore.core.lookup import LookupReport
from pagedcore.messages import AddRequest
from pagedcore.observe.recorder import Recorder
from pagedcore.outputs import CacheReport

DIGEST_AT_EVENTS = 1024
"""A thread digests what waits when it is this much; what is less waits for `advice`."""

MAX_WAITING_EVENTS = 65_536
"""When digesting falls behind this far, what waits is thrown away."""

PAUSES_PER_STUDY = 9
"""The thread that digests pauses so many times as long as it studied, so that the engine thread finds the interpreter free: a request takes
tenths of a millisecond, and while steps are launched one by one each of them would be missed."""

Explained = tuple[CacheReport, tuple[str, ...]]

logger = logging.getLogger(__name__)


class Advisor:
    """Owns the study of one engine's traffic, and the events that wait for it.

    `record` belongs to the engine thread and keeps references only. A thread that lives as long as there is much to digest
    does the rest, or whoever asks for advice.
    """

    def __init__(self, recorder: Recorder, limits: SchedulerLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Listens to the recorder from now on."""
        self._recorder = recorder
        self._clock = clock
        self._limits = limits
        self._study = TrafficStudy(limits.block_size, limits.num_blocks, num_host_blocks=limits.num_host_blocks)
        self._waiting: deque[tuple[int, list[Event], dict[str, Explained]]] = deque()
        """Step, its events, and why blocks missed of those that were looked up in it: later another request may have their id."""
        self._num_waiting = 0
        self._num_steps = 0
        self._has_lost_events = False
        self._requests: dict[str, AddRequest] = {}
        self._first_lookup_s: float | None = None
        self._trace: TraceWriter | None = None
        self._digesting = threading.Lock()
        self._is_hurried = False
        recorder.add_listener(self.record)

    # ---- the engine thread

    def record(self, step: StepEvents) -> None:
        """Keep a step's events for later."""
        self._num_steps += step.step_id is not None
        if step.events:
            self._waiting.append((self._num_steps, step.events, self._explained(step.events)))
            self._num_waiting += len(step.events)
            if self._num_waiting >= DIGEST_AT_EVENTS:
                self._hand_over()

    def _explained(self, events: list[Event]) -> dict[str, Explained]:
        looked_up = [event.request_id for event in events if isinstance(event, Admitted) and event.lookup is not None]
        found = ((request_id, self._recorder.explained(request_id)) for request_id in looked_up)
        return {request_id: explained for request_id, explained in found if explained is not None}

    def _hand_over(self) -> None:
        if self._num_waiting > MAX_WAITING_EVENTS:
            self._waiting.clear()
            self._num_waiting = 0
            self._has_lost_events = True
        elif not self._digesting.locked():
            self._num_waiting = 0
            threading.Thread(target=self._digest_slowly, name="pagedcore-advisor", daemon=True).start()

    # ---- any other thread

    def advice(self) -> Advice:
        """Digest what waits and say what was learnt."""
        self.digest()
        stats = self._recorder.stats()
        with self._digesting:
            window_s = 0.0 if self._first_lookup_s is None else self._clock() - self._first_lookup_s
            is_caching_on, studied = self._limits.enable_prefix_caching, self._study.sketch.ideal_hit_rate()
            return self._study.advice(
                hit_rate=_known(stats.hit_rate("prefix")),
                ideal_hit_rate=_known(stats.ideal_hit_rate) if is_caching_on else studied,
                window_s=window_s,
                is_caching_on=is_caching_on,
                num_preemptions=stats.num_preemptions,
            )

    def record_trace(self, path: str | Path | None) -> None:
        """Write every request that ends from now on to a trace file, see `pagedcore.advice.trace`; None ends the one that is written.

        Raises `ConfigError` for a file that cannot be opened.
        """
        writer = None if path is None else TraceWriter(path)
        self.digest()
        with self._digesting:
            self._end_trace()
            self._trace = writer

    def close(self) -> None:
        """The trace file, if one is written, is complete. Advice can still be asked for."""
        if self._trace is not None:
            self.record_trace(None)

    def digest(self) -> None:
        """Study what waits now. A thread that is at it makes haste."""
        self._is_hurried = True
        with self._digesting:
            self._is_hurried = True
            self._digest_waiting()
            self._is_hurried = False

    def _digest_slowly(self) -> None:
        with self._digesting:
            self._digest_waiting()

    def _digest_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            try:
                step, events, explained = self._waiting.popleft()
            except IndexError:
                return
            self._digest_events(step, events, explained)

    def _digest_events(self, step: int, events: list[Event], explained: dict[str, Explained]) -> None:
        if self._has_lost_events:
            self._has_lost_events = False
            self._requests.clear()
            self._study.sketch.forget_running(now=step)
        for event in events:
            start_s = time.thread_time()
            if isinstance(event, Arrived):
                self._requests.setdefault(event.request.request_id, event.request)
            elif isinstance(event, Admitted):
                self._admitted(event, step, explained.get(event.request_id))
            elif isinstance(event, Finished):
                self._finished(event, step)
            elif isinstance(event, BlocksForgotten):
                self._study.sketch.forget_cached()
            if isinstance(event, Admitted | Finished) and not self._is_hurried:
                time.sleep(PAUSES_PER_STUDY * (time.thread_time() - start_s))

    def _admitted(self, event: Admitted, step: int, explained: Explained | None) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            return  # its arrival was not recorded
        if self._first_lookup_s is None:
            self._first_lookup_s = event.now_s
        self._study.admit(_prompt_of(request, event), now=step)
        if event.lookup is not None and explained is not None:
            report, reasons = explained
            if report.diverged_at_token is not None:
                self._study.note_shared_tail(report.diverged_at_token - event.lookup.num_hit_tokens)
            self._note_evicted(request, event.lookup, reasons)

    def _note_evicted(self, request: AddRequest, lookup: LookupReport, reasons: tuple[str, ...]) -> None:
        num_evicted = reasons.count("evicted")
        if not num_evicted:
            return
        last = len(reasons) - 1 - reasons[::-1].index("evicted")
        self._study.costly_prefixes.add(
            CostlyPrefix(
                prefix=lookup.missed[last][0].hex(),
                tenant=request.tenant,
                num_tokens=(lookup.first_missing_block + last + 1) * self._limits.block_size,
                recomputed_tokens=num_evicted * self._limits.block_size,
                latest_request_id=request.group_id,
            )
        )

    def _finished(self, event: Finished, step: int) -> None:
        request_id = event.request.request_id
        if self._requests.get(request_id) is event.request:  # one whose id was in use is rejected, and the open request goes on
            del self._requests[request_id]
            self._write_trace(event)
            self._study.sketch.finish(request_id, event.num_output_tokens, now=step)

    def _write_trace(self, event: Finished) -> None:
        """Inference does not end with a disk that is full: the fault is logged, and the trace ends."""
        if self._trace is None or event.admitted_s is None:
            return
        try:
            self._trace.write(_traced(event))
        except OSError as error:
            logger.error("The trace of requests ends: %s", error)
            self._end_trace()

    def _end_trace(self) -> None:
        writer, self._trace = self._trace, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()


def _traced(event: Finished) -> TracedRequest:
    request = event.request
    return TracedRequest(
        request_id=request.request_id,
        arrival_s=request.arrival_s,
        admitted_s=event.admitted_s,
        finished_s=event.now_s,
        prompt_token_ids=request.prompt_token_ids,
        num_output_tokens=event.num_output_tokens,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        is_greedy=request.params.is_greedy,
    )


def _prompt_of(request: AddRequest, event: Admitted) -> Prompt:
    return Prompt(
        request_id=request.request_id,
        token_ids=request.prompt_token_ids,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        reads_cache=request.params.prompt_logprobs is None,
        is_counted=event.lookup is not None,
        is_greedy=request.params.is_greedy,
    )


def _known(rate: float) -> float | None:
    return None if math.isnan(rate) else rate
