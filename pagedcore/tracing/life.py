"""One request's life as it is remembered: plain facts, without its prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pagedcore.core.events import Finished
from pagedcore.messages import AddRequest
from pagedcore.outputs import CacheReport, FinishReason, Status
from pagedcore.sampling_params import SamplingParams
from pagedcore.traceparent import TraceParent, parse_traceparent

MAX_EVENTS = 256
"""Events kept of one life, beside its end: a long prompt in small chunks has one a chunk."""

POINTS = frozenset({"prefill_chunk", "preempted", "resumed", "swapped_out", "swapped_in", "passed_over", "first_token"})
"""Events that happen within a life; the others are ends of its phases."""

NEXT_STEP = "next_step"
"""Waiting for the first plan that looks at it: in the inbox, or behind a step that runs."""


class LifeEvent(NamedTuple):
    """One moment of a life, in seconds on the engine's monotonic clock."""

    name: str
    at_s: float
    facts: dict[str, Any] | None = None


class Phase(NamedTuple):
    """A stretch of a life: `queue`, `prefill`, `decode` or `preempted`."""

    name: str
    start_s: float
    end_s: float


class Asked(NamedTuple):
    """What a request was when it came, but for its prompt."""

    request_id: str
    group_id: str
    choice_index: int
    num_choices: int
    tenant: str | None
    request_class: str | None
    user: str | None
    adapter: str
    priority: int
    params: SamplingParams
    arrival_s: float
    routing: str | None


@dataclass(slots=True)
class Wait:
    """A stay in the waiting queue that has not ended."""

    since_s: float
    reason: str | None
    """None: that for which the queue stands still, which may change; see `WaitBook`."""
    mark: dict[tuple[int | None, str], float] = field(default_factory=dict)
    """The clocks of the queue at `since_s`, where `reason` is None."""


@dataclass(slots=True, kw_only=True, eq=False)
class Life:
    """One choice of one request, from its arrival on. `History` writes it until it has ended; then it is only read.

    Its events are in the order of their times, the first is `arrived`, and exactly one is `finished`, the last.
    """

    request: Asked
    parent: TraceParent | None
    """The caller's span."""
    trace_id: str | None
    """The caller's trace, or the one that our own span began."""
    num_prompt_tokens: int
    wait: Wait | None
    waited_s: dict[str, float] = field(default_factory=dict)
    """Reason -> seconds in the waiting queue, before the first admission and after preemptions."""
    events: list[LifeEvent] = field(default_factory=list)
    num_events_left_out: int = 0
    report: CacheReport | None = None
    """None before the first admission, and for choices i > 0 of n, which have no lookup of their own."""
    status: Status = "running"
    finish_reason: FinishReason | None = None
    reject_reason: str | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_output_tokens: int = 0
    num_held_blocks: int = 0
    num_new_blocks: int = 0
    num_preemptions: int = 0

    def note(self, name: str, at_s: float, facts: dict[str, Any] | None = None) -> None:
        """Add an event; past `MAX_EVENTS` it is only counted."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(LifeEvent(name, at_s, facts))
        else:
            self.num_events_left_out += 1

    def end(self, event: Finished, report: CacheReport | None) -> None:
        """Its one terminal event. `report` is the final one."""
        self.status, self.finish_reason, self.reject_reason = event.status, event.finish_reason, event.reject_reason
        self.report = report
        self.first_token_s, self.last_token_s, self.finished_s = event.first_token_s, event.last_token_s, event.now_s
        self.num_output_tokens, self.num_preemptions = event.num_output_tokens, event.num_preemptions
        self.num_held_blocks, self.num_new_blocks = event.num_held_blocks, event.num_new_blocks
        self.events.append(LifeEvent("finished", event.now_s, {"status": event.status, "finish_reason": event.finish_reason}))

    @property
    def decode_s_per_token(self) -> float | None:
        """(last token - first token) / (tokens - 1)."""
        if self.first_token_s is None or self.last_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output_tokens - 1)

    def since_arrival_s(self, at_s: float | None) -> float | None:
        """None for what has not happened."""
        return None if at_s is None else at_s - self.request.arrival_s

    def phases(self, now_s: float) -> list[Phase]:
        """What it did from its arrival to its end (or to `now_s`), without a gap. A refused request did nothing."""
        if self.status == "rejected":
            return []
        found: list[Phase] = []
        name, start_s, has_first_token = "queue", self.request.arrival_s, False
        for event in self.events:
            has_first_token = has_first_token or event.name == "first_token"
            following = _phase_after(event.name, name, has_first_token=has_first_token)
            if following is not None:
                found.append(Phase(name, start_s, event.at_s))
                name, start_s = following, event.at_s
        end_s = now_s if self.finished_s is None else self.finished_s
        return [*found, Phase(name, start_s, end_s)]


def begin_life(request: AddRequest, now_s: float) -> Life:
    """A request that the engine took out of its inbox at `now_s`."""
    parent = None if request.traceparent is None else parse_traceparent(request.traceparent)
    asked = Asked(
        request.request_id,
        request.group_id,
        request.choice_index,
        request.num_choices,
        request.tenant,
        request.request_class,
        request.user,
        request.adapter,
        request.priority,
        request.params,
        request.arrival_s,
        request.routing,
    )
    life = Life(
        request=asked,
        parent=parent,
        trace_id=None if parent is None else parent.trace_id,
        num_prompt_tokens=len(request.prompt_token_ids),
        wait=Wait(request.arrival_s, NEXT_STEP),
    )
    life.note("arrived", request.arrival_s)
    life.note("queued", now_s)
    return life


def _phase_after(event: str, phase: str, *, has_first_token: bool) -> str | None:
    """The phase that an event begins; None where it begins none."""
    if event == "preempted":
        return "preempted"
    if event in ("admitted", "resumed"):
        return "decode" if has_first_token else "prefill"
    # The step in flight at a preemption may still bring the first token to a request that waits.
    return "decode" if event == "first_token" and phase == "prefill" else None
