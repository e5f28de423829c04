"""The Trace Event Format that chrome://tracing and ui.perfetto.dev read: requests, steps, and counters of batch and blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pagedcore.tracing.life import POINTS, Life
from pagedcore.tracing.record import facts_of
from pagedcore.tracing.steps import TracedStep

ENGINE_PID, REQUESTS_PID = 1, 2
STEPS_TID = 1

TraceEvent = dict[str, Any]


def chrome_trace(lives: Sequence[Life], steps: Sequence[TracedStep], *, engine_name: str, now_s: float) -> dict[str, Any]:
    """The whole file of one engine as one JSON object: one track a request, one for the steps. What still runs ends at `now_s`.

    Times are microseconds on the machine's monotonic clock, which its processes share.
    """
    lives = sorted(lives, key=lambda life: life.request.arrival_s)
    events = [*_names(engine_name, lives), *_step_events(steps)]
    for track, life in enumerate(lives, start=1):
        events += _life_events(life, track, now_s)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _names(engine_name: str, lives: Sequence[Life]) -> Iterator[TraceEvent]:
    yield _meta("process_name", ENGINE_PID, 0, name=f"engine {engine_name}")
    yield _meta("process_sort_index", ENGINE_PID, 0, sort_index=ENGINE_PID)
    yield _meta("thread_name", ENGINE_PID, STEPS_TID, name="steps")
    yield _meta("process_name", REQUESTS_PID, 0, name=f"requests of {engine_name}")
    yield _meta("process_sort_index", REQUESTS_PID, 0, sort_index=REQUESTS_PID)
    for track, life in enumerate(lives, start=1):
        yield _meta("thread_name", REQUESTS_PID, track, name=life.request.request_id)
        yield _meta("thread_sort_index", REQUESTS_PID, track, sort_index=track)


def _meta(what: str, pid: int, tid: int, **args: str | int) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _slice(name: str, pid: int, tid: int, start_us: float, end_us: float, **args: Any) -> TraceEvent:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start_us, "dur": max(end_us - start_us, 0.0), "args": args}


def _step_events(steps: Sequence[TracedStep]) -> Iterator[TraceEvent]:
    shown: dict[str, dict[str, int]] = {}
    for step in steps:
        end_us = _us(step.ended_s)
        yield _slice(
            "prefill step" if step.num_prefill_tokens else "decode step",
            ENGINE_PID,
            STEPS_TID,
            _us(step.began_s),
            end_us,
            step_id=step.step_id,
            num_tokens=step.num_tokens,
            num_prefill_tokens=step.num_prefill_tokens,
            num_sequences=step.num_sequences,
            gap_us=None if step.gap_s is None else round(step.gap_s * 1e6, 3),
        )
        for name, values in _counters(step):
            if shown.get(name) != values:
                shown[name] = values
                yield {"ph": "C", "name": name, "pid": ENGINE_PID, "tid": 0, "ts": end_us, "args": values}


def _counters(step: TracedStep) -> Iterator[tuple[str, dict[str, int]]]:
    yield "blocks", {"active": step.num_active_blocks, "cached": step.num_cached_blocks, "free": step.num_free_blocks}
    yield "batch size", {"sequences": step.num_sequences}
    yield "requests", {"running": step.num_running, "waiting": step.num_waiting}


def _life_events(life: Life, track: int, now_s: float) -> Iterator[TraceEvent]:
    """The whole request, its phases inside, and points for what happened in them. An outer slice stands before its inner ones."""
    end_s = now_s if life.finished_s is None else life.finished_s
    start_us, end_us = _us(life.request.arrival_s), _us(end_s)
    yield _slice(life.request.request_id, REQUESTS_PID, track, start_us, end_us, **facts_of(life))
    for phase in life.phases(now_s):
        yield _slice(phase.name, REQUESTS_PID, track, _us(phase.start_s), _us(phase.end_s))
    for event in life.events:
        if event.name in POINTS:
            at_us = _us(event.at_s)
            yield {"ph": "i", "s": "t", "name": event.name, "pid": REQUESTS_PID, "tid": track, "ts": at_us, "args": event.facts or {}}


def _us(at_s: float) -> float:
    return round(at_s * 1e6, 3)
