"""A life as the live page, the log and the trace file show it: a JSON object with plain units."""

from __future__ import annotations

from typing import Any

from pagedcore.outputs import CacheReport
from pagedcore.tracing.life import Life, LifeEvent


def record_of(life: Life) -> dict[str, Any]:
    """All that is known of a request; what has not happened is None. Times are milliseconds, those of events since its arrival.

    `status` of a request that has not ended is "waiting" or "running". `cached_tokens` and `miss` are empty where no lookup
    was made: before the first admission, and for choices i > 0 of n. The milliseconds of `waiting_reason_ms` sum up to
    `time_in_queue_ms` and the waits after preemptions.
    """
    return {**facts_of(life), "events": [_event(life, event) for event in life.events], "num_events_left_out": life.num_events_left_out}


def facts_of(life: Life) -> dict[str, Any]:
    """The record without its events."""
    request, report = life.request, life.report
    return {
        "request_id": request.request_id,
        "group_id": request.group_id,
        "tenant": request.tenant,
        "class": request.request_class,
        "user": request.user,
        "adapter": request.adapter,
        "routing": request.routing,
        "status": _status(life),
        "finish_reason": life.finish_reason,
        "reject_reason": life.reject_reason,
        "prompt_tokens": life.num_prompt_tokens,
        "completion_tokens": life.num_output_tokens,
        "cached_tokens": {} if report is None else _by_source(report),
        "miss": {} if report is None else dict(report.miss_blocks),
        "first_divergence": None if report is None else report.diverged_at_token,
        "nearest_cached_prefix": None if report is None else _nearest(report),
        "time_in_queue_ms": _ms(life.since_arrival_s(life.admitted_s)),
        "waiting_reason_ms": {reason: _ms(seconds) for reason, seconds in life.waited_s.items()},
        "ttft_ms": _ms(life.since_arrival_s(life.first_token_s)),
        "decode_latency_ms_per_token": _ms(life.decode_s_per_token),
        "e2e_ms": _ms(life.since_arrival_s(life.finished_s)),
        "kv_cache_pages_allocated": life.num_held_blocks,
        "kv_cache_pages_new": life.num_new_blocks,
        "preemptions": life.num_preemptions,
        "trace_id": life.trace_id,
    }


def is_match(life: Life, search: str) -> bool:
    """Whether a text stands, in any case, in one of the words by which people look for a request."""
    request = life.request
    words = (
        request.request_id,
        request.tenant,
        request.request_class,
        request.user,
        request.adapter,
        _status(life),
        life.finish_reason,
        life.reject_reason,
        life.trace_id,
    )
    return any(search.lower() in word.lower() for word in words if word is not None)


def _status(life: Life) -> str:
    if life.status != "running":
        return life.status
    return "running" if life.wait is None else "waiting"


def _by_source(report: CacheReport) -> dict[str, int]:
    return {"live": report.live_tokens, "pool": report.pool_tokens, "host": report.host_tokens}


def _nearest(report: CacheReport) -> int:
    """Leading prompt tokens that a cached prompt shares, up to inside the block that missed."""
    return report.num_cached_tokens if report.diverged_at_token is None else report.diverged_at_token


def _event(life: Life, event: LifeEvent) -> dict[str, Any]:
    return {"name": event.name, "t_ms": _ms(event.at_s - life.request.arrival_s), **(event.facts or {})}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000.0, 3)
