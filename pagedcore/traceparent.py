"""W3C Trace Context: which trace of its caller a request belongs to."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

_FORM = re.compile(r"(?P<version>[0-9a-f]{2})-(?P<trace_id>[0-9a-f]{32})-(?P<span_id>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?")


@dataclass(frozen=True, slots=True)
class TraceParent:
    """A caller's span. Ids are lower-case hexadecimal."""

    trace_id: str
    span_id: str
    flags: int
    """Bit 0: the caller records this trace."""


def parse_traceparent(text: str) -> TraceParent | None:
    """The span that a `traceparent` header names; None for a header that the standard tells us to ignore."""
    match = _FORM.fullmatch(text)
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["rest"]):
        return None
    if not int(match["trace_id"], 16) or not int(match["span_id"], 16):
        return None
    return TraceParent(match["trace_id"], match["span_id"], int(match["flags"], 16))


def trace_id_of(traceparent: str | None) -> str | None:
    """The trace that a caller's span belongs to."""
    parent = None if traceparent is None else parse_traceparent(traceparent)
    return None if parent is None else parent.trace_id


def current_traceparent() -> str | None:
    """The OpenTelemetry span that is current in this thread or task; None where there is none.

    Imports nothing: a host with a current span has imported the package itself.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    span = trace.get_current_span().get_span_context()
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags & 1:02x}" if span.is_valid else None
