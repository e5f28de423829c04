"""A tracer provider of our own that sends spans to a collector over OTLP/HTTP, for engines whose host has set none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pagedcore.errors import MissingExtraError
from pagedcore.extras import pip_command

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

EXPORT_TIMEOUT_S = 5.0
"""What a collector that does not answer can delay the end of an engine by."""


def otlp_provider(endpoint: str, engine: str) -> TracerProvider:
    """A provider whose spans go to `endpoint` in batches, off every thread of ours; the process' own one is left alone.

    Raises `MissingExtraError` where no more of OpenTelemetry is installed than its API. Sampling and headers follow OpenTelemetry's own
    environment variables.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingExtraError(
            f"otlp_endpoint={endpoint!r} needs OpenTelemetry's SDK and OTLP exporter, which are not installed (its API alone comes with "
            f"other packages); install them with: {pip_command('otel')}."
        ) from error
    service = os.environ.get("OTEL_SERVICE_NAME", "pagedcore")
    provider = SdkTracerProvider(resource=Resource.create({"service.name": service, "service.instance.id": engine}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=EXPORT_TIMEOUT_S)))
    return provider


def traces_url(endpoint: str) -> str:
    """The URL that spans are posted to: a collector's address stands for its /v1/traces."""
    return endpoint.rstrip("/") + "/v1/traces" if urlsplit(endpoint).path in ("", "/") else endpoint
