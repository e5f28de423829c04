"""How fast an engine went in the last minute."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pagedcore.console.minute import WINDOW_S, Minute, percentile
from pagedcore.core.events import Arrived, Finished, FirstToken, StepEvents


class Gap(NamedTuple):
    """The longest time that a running request waited for the token of one step, and what that step computed."""

    seconds: float
    num_tokens: int
    num_prefill_tokens: int


@dataclass(slots=True)
class _Second:
    """What happened in one second."""

    busy_s: float = 0.0
    """Step time that ended in it."""
    num_generated_tokens: int = 0
    num_prefill_tokens: int = 0
    num_ended: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    """One a step in which somebody waited for a token after the first."""


class Pace:
    """Owns the seconds of the last minute. `record` belongs to the engine thread, `last_minute` to any.

    A request of n choices ends, and has its time to first token, with the first of them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._lock = threading.Lock()
        self._minute = Minute(_Second)
        self._last_commit_s = -math.inf
        self._unanswered: dict[str, float] = {}
        """First choice of a request -> its arrival, until its first token or its end."""

    def record(self, step: StepEvents) -> None:
        """Count one batch of events."""
        with self._lock:
            now = self._minute.at(step.now_s)
            now.num_generated_tokens += step.num_generated_tokens
            now.num_prefill_tokens += step.num_prefill_tokens
            if step.inter_token_gaps_s:
                now.gaps.append(Gap(max(step.inter_token_gaps_s), step.num_tokens, step.num_prefill_tokens))
            if step.step_id is not None:
                if step.submitted_s is not None:
                    now.busy_s += step.now_s - max(step.submitted_s, self._last_commit_s)
                self._last_commit_s = step.now_s
            for event in step.events:
                self._note(event)

    def last_minute(self) -> dict[str, Any]:
        """Shares, rates and times of the last minute; None where there was nothing to take them of."""
        now_s = self._clock()
        with self._lock:
            seconds = list(self._minute.until(now_s))
        window_s = max(min(float(WINDOW_S), now_s - self._began_s), 1.0)
        ttfts_s = sorted(ttft_s for second in seconds for ttft_s in second.ttfts_s)
        return {
            "seconds": window_s,
            "step_busy_ratio": min(sum(second.busy_s for second in seconds) / window_s, 1.0),
            "generated_tokens_per_s": sum(second.num_generated_tokens for second in seconds) / window_s,
            "prefill_tokens_per_s": sum(second.num_prefill_tokens for second in seconds) / window_s,
            "num_ended": sum(second.num_ended for second in seconds),
            "num_first_tokens": len(ttfts_s),
            "ttft_p50_s": percentile(ttfts_s, 0.50),
            "ttft_p99_s": percentile(ttfts_s, 0.99),
            **_gap_facts(sorted(gap for second in seconds for gap in second.gaps)),
        }

    def _note(self, event: object) -> None:
        """In the second of the event: what happens outside a step comes with the time of the last one, which may be long ago."""
        if isinstance(event, FirstToken):
            arrival_s = self._unanswered.pop(event.request_id, None)
            if arrival_s is not None:
                self._minute.at(event.now_s).ttfts_s.append(event.now_s - arrival_s)
        elif isinstance(event, Arrived):
            if event.request.choice_index == 0:
                self._unanswered.setdefault(event.request.request_id, event.request.arrival_s)
        elif isinstance(event, Finished) and event.request.choice_index == 0:
            self._minute.at(event.now_s).num_ended += 1
            if self._unanswered.get(event.request.request_id) == event.request.arrival_s:  # not that of a duplicate
                del self._unanswered[event.request.request_id]


def _gap_facts(ordered: list[Gap]) -> dict[str, Any]:
    """Of the longest waits for a token, one a step: the usual one, and the longest with what its step computed."""
    longest = ordered[-1] if ordered else None
    return {
        "token_gap_p50_s": percentile([gap.seconds for gap in ordered], 0.50),
        "token_gap_max_s": None if longest is None else longest.seconds,
        "token_gap_max_step_tokens": None if longest is None else longest.num_tokens,
        "token_gap_max_step_prefill_tokens": None if longest is None else longest.num_prefill_tokens,
    }
