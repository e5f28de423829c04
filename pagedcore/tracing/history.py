"""The requests that run and the last ones that ended, each with its life-cycle events."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

from pagedcore.core.events import Admitted, Arrived, Finished, FirstToken, PassedOver, Preempted, PrefillChunk, Resumed, StepEvents
from pagedcore.guard import Guard
from pagedcore.host_tier.swapped import Swapped
from pagedcore.outputs import CacheReport
from pagedcore.tracing.life import NEXT_STEP, Life, Wait, begin_life
from pagedcore.tracing.record import is_match, record_of
from pagedcore.tracing.steps import StepRing, TracedStep
from pagedcore.tracing.waits import WaitBook

MAX_ENDED = 1024
"""Ended requests that are remembered."""


class History:
    """Owns the lives of the running requests and of the last `MAX_ENDED` ended ones, and the last steps.

    `record` belongs to the engine thread; the other methods may be called from any. Every request that arrived has exactly
    one `finished`; events of one whose arrival was not recorded are left out.
    """

    def __init__(self, find_report: Callable[[str], CacheReport | None], *, clock: Callable[[], float] = time.monotonic) -> None:
        """`find_report` gives the cache report of a request by its id."""
        self._find_report = find_report
        self._clock = clock
        self._running: dict[str, Life] = {}
        self._refused: Life | None = None
        """A second arrival under an id in use: it can only be rejected, next, while the first one goes on."""
        self._ended: deque[Life] = deque(maxlen=MAX_ENDED)
        self._just_ended: list[Life] = []
        self._steps = StepRing()
        self._waits = WaitBook()
        self._lock = threading.Lock()
        self._guard = Guard("Something that happened to a request is not in the history.")
        self._handlers: dict[type, Callable[[Any], None]] = {
            Arrived: self._arrived,
            Admitted: self._admitted,
            PassedOver: self._passed_over,
            PrefillChunk: self._chunk,
            FirstToken: self._first_token,
            Preempted: self._preempted,
            Resumed: self._resumed,
            Swapped: self._swapped,
            Finished: self._finished,
        }

    # ---- the engine thread

    def record(self, step: StepEvents) -> list[Life]:
        """Note what happened; returns the lives that ended. Costs a look at each event, none at each token or waiting request."""
        with self._lock:
            planned_s = step.planned_s
            for event in step.events:
                if planned_s is not None and event.now_s > planned_s:
                    self._waits.plan(planned_s, step.stop_key)
                    planned_s = None
                handler = self._handlers.get(type(event))
                if handler is not None:
                    self._guard(handler, event)
            if planned_s is not None:
                self._waits.plan(planned_s, step.stop_key)
            self._steps.record(step)
            ended, self._just_ended = self._just_ended, []
        return ended

    # ---- any thread

    def find(self, request_id: str) -> dict[str, Any] | None:
        """The record of a running request, or of the last one that ended under this id; None for others."""
        with self._lock:
            life = self._running.get(request_id)
            if life is not None:
                life = self._snapshot(life)
            else:
                life = next((ended for ended in reversed(self._ended) if ended.request.request_id == request_id), None)
        return None if life is None else record_of(life)

    def recent(self, n: int = 100, search: str = "") -> list[dict[str, Any]]:
        """Records of at most `n` requests: those that run, the newest first, then those that ended, the last first.

        `search` keeps those whose ids, tenant, class, user, adapter, status or reasons hold this text, in any case.
        """
        found = (life for life in reversed(self.lives()) if is_match(life, search))
        return [record_of(life) for life in islice(found, n)]

    def lives(self) -> list[Life]:
        """Ended lives in the order of their ends, then the running ones, as they are now, in the order of their arrivals."""
        with self._lock:
            return [*self._ended, *map(self._snapshot, self._running.values())]

    def steps(self) -> list[TracedStep]:
        """The last steps, in order."""
        with self._lock:
            return self._steps.steps()

    # ---- under the lock

    def _snapshot(self, life: Life) -> Life:
        """A running life as it is now, for other threads to read."""
        return replace(
            life,
            events=list(life.events),
            waited_s=self._waits.waited_s(life, self._clock()),
            report=self._report_of(life),
        )

    def _report_of(self, life: Life) -> CacheReport | None:
        """None before it was looked up: what is known under its id is then of an earlier request."""
        return None if life.admitted_s is None else self._find_report(life.request.request_id)

    def _arrived(self, event: Arrived) -> None:
        life = begin_life(event.request, event.now_s)
        if event.request.request_id in self._running:
            self._refused = life
        else:
            self._running[event.request.request_id] = life
            self._waits.begin(life)

    def _admitted(self, event: Admitted) -> None:
        life = self._running.get(event.request_id)
        if life is not None:
            self._waits.end(life, event.now_s)
            life.admitted_s = event.now_s
            life.note("admitted", event.now_s)

    def _passed_over(self, event: PassedOver) -> None:
        life = self._running.get(event.request_id)
        if life is not None:
            self._waits.pass_over(life, event.now_s, event.reason)
            if event.reason not in (None, "batch_window"):
                life.note("passed_over", event.now_s)

    def _chunk(self, event: PrefillChunk) -> None:
        life = self._running.get(event.request_id)
        if life is not None:
            life.note("prefill_chunk", event.now_s, {"num_tokens": event.num_tokens})

    def _first_token(self, event: FirstToken) -> None:
        life = self._running.get(event.request_id)
        if life is not None:
            life.first_token_s = event.now_s
            life.note("first_token", event.now_s)

    def _preempted(self, event: Preempted) -> None:
        life = self._running.get(event.request_id)
        if life is not None:
            life.num_preemptions += 1
            life.wait = Wait(event.now_s, NEXT_STEP)
            self._waits.begin(life)
            usage = {"usage_before": event.usage_before, "usage_after": event.usage_after}
            life.note("preempted", event.now_s, {"num_lost_tokens": event.num_lost_tokens, **usage})

    def _resumed(self, event: Resumed) -> None:
        life = self._running.get(event.request_id)
        if life is not None:
            self._waits.end(life, event.now_s)
            life.note("resumed", event.now_s, {"num_recomputed_tokens": event.num_recomputed_tokens})

    def _swapped(self, event: Swapped) -> None:
        life = self._running.get(event.request_id)
        if life is not None:
            life.note(f"swapped_{event.direction}", event.now_s, {"num_blocks": event.num_blocks})

    def _finished(self, event: Finished) -> None:
        if self._refused is not None and event.status == "rejected":
            life, self._refused = self._refused, None
        elif event.request.request_id in self._running:
            life = self._running.pop(event.request.request_id)
        else:
            return
        self._waits.end(life, event.now_s)
        life.end(event, self._report_of(life))
        self._ended.append(life)
        self._just_ended.append(life)
