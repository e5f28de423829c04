"""OpenTelemetry spans of requests that have ended, under the caller's span, named by the GenAI semantic conventions."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pagedcore.guard import Guard
from pagedcore.traceparent import TraceParent
from pagedcore.tracing.life import POINTS, Life

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider

OPERATION = "text_completion"
"""The engine completes token ids, whichever route they came by."""


class Spans:
    """Makes one span a request (each choice of n), with the phases of its life as children.

    They go to `provider`, or else to the provider that the process has set, whenever it does. Without either nothing is
    made, and OpenTelemetry is not imported.
    """

    def __init__(
        self,
        model_name: str,
        provider: TracerProvider | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._model_name = model_name
        self._own_provider = provider
        self._clock = clock
        self._wall = wall
        self._guard = Guard("An ended request has no span.")

    @property
    def has_provider(self) -> bool:
        """Whether spans go anywhere now."""
        return self._provider() is not None

    def take(self, lives: Sequence[Life]) -> None:
        """Make the spans of these, as far as the provider takes them. A life that had no trace is told the id of the one it began."""
        provider = self._provider()
        if provider is None:
            return
        tracer = provider.get_tracer("pagedcore")
        to_unix_s = self._wall() - self._clock()
        for life in lives:
            self._guard(_make_span, tracer, life, self._model_name, to_unix_s)

    def close(self) -> None:
        """What was made for a provider of ours has been sent, or given up."""
        shut_down: Callable[[], None] | None = getattr(self._own_provider, "shutdown", None)
        if shut_down is not None:
            shut_down()

    def _provider(self) -> TracerProvider | None:
        if self._own_provider is not None:
            return self._own_provider
        trace: Any = sys.modules.get("opentelemetry.trace")
        if trace is None:
            return None
        provider: TracerProvider = trace.get_tracer_provider()
        return None if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)) else provider


def _make_span(tracer: Tracer, life: Life, model_name: str, to_unix_s: float) -> None:
    from opentelemetry.trace import SpanKind, format_trace_id, set_span_in_context

    def unix_ns(at_s: float) -> int:
        return int((at_s + to_unix_s) * 1e9)

    end_s = life.request.arrival_s if life.finished_s is None else life.finished_s
    span = tracer.start_span(
        f"{OPERATION} {model_name}",
        context=_context_of(life.parent),
        kind=SpanKind.INTERNAL,
        attributes=_attributes(life, model_name),
        start_time=unix_ns(life.request.arrival_s),
    )
    if life.trace_id is None and span.is_recording():
        life.trace_id = format_trace_id(span.get_span_context().trace_id)
    for event in life.events:
        if event.name in POINTS:
            span.add_event(event.name, event.facts, timestamp=unix_ns(event.at_s))
    for phase in life.phases(end_s):
        child = tracer.start_span(phase.name, context=set_span_in_context(span), start_time=unix_ns(phase.start_s))
        child.end(unix_ns(phase.end_s))
    _set_status(span, life)
    span.end(unix_ns(end_s))


def _context_of(parent: TraceParent | None) -> Context:
    """The caller's span as a context; an empty one begins a trace."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if parent is None:
        return Context()
    remote = SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), is_remote=True, trace_flags=TraceFlags(parent.flags))
    return set_span_in_context(NonRecordingSpan(remote), Context())


def _set_status(span: Span, life: Life) -> None:
    """An aborted request is no error: its caller left."""
    from opentelemetry.trace import StatusCode

    if life.status in ("rejected", "error"):
        span.set_attribute("error.type", life.reject_reason or "engine_error")
        span.set_status(StatusCode.ERROR, life.status)


def _attributes(life: Life, model_name: str) -> dict[str, Any]:
    """Facts of a request that are there. The prompt of n choices counts once, with the first."""
    request, params, report = life.request, life.request.params, life.report
    facts = {
        "gen_ai.operation.name": OPERATION,
        "gen_ai.provider.name": "pagedcore",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.response.id": request.group_id,
        "gen_ai.response.finish_reasons": None if life.finish_reason is None else [life.finish_reason],
        "gen_ai.request.choice.count": request.num_choices if request.num_choices > 1 else None,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
        "gen_ai.usage.input_tokens": life.num_prompt_tokens if request.choice_index == 0 else None,
        "gen_ai.usage.output_tokens": life.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": None if report is None else report.num_cached_tokens,
        "pagedcore.request_id": request.request_id,
        "pagedcore.adapter": request.adapter,
        "pagedcore.tenant": request.tenant,
        "pagedcore.request_class": request.request_class,
        "pagedcore.status": life.status,
        "pagedcore.reject_reason": life.reject_reason,
        "pagedcore.preemptions": life.num_preemptions,
        "pagedcore.kv_cache_pages_allocated": life.num_held_blocks,
        "pagedcore.kv_cache_pages_new": life.num_new_blocks,
        **{f"pagedcore.waiting_ms.{reason}": round(seconds * 1000.0, 3) for reason, seconds in life.waited_s.items()},
    }
    return {name: value for name, value in facts.items() if value is not None}
