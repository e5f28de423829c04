"""What a scrape reads: the Prometheus text of this process, or of all processes of a multi-process set-up."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pagedcore.observe.prometheus import Exporter, default_registry, is_multiprocess, known_exporter, multiprocess_dir_fault

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

logger = logging.getLogger(__name__)


def metrics_text(registry: CollectorRegistry | None = None, accept: str = "") -> tuple[bytes, str]:
    """The exposition and its content type; engines of this process are brought up to date first.

    A plain process answers in OpenMetrics, with exemplars, where `accept` (a scraper's header) names it.
    `registry` None is prometheus_client's default one. When the directory of a multi-process set-up cannot be read, the
    text is a comment that says why: a scrape then shows no series, and nothing else suffers.
    """
    from prometheus_client import generate_latest
    from prometheus_client.exposition import choose_encoder

    registry = default_registry() if registry is None else registry
    exporter = known_exporter(registry)
    if exporter is not None:
        exporter.flush()
    fault = multiprocess_dir_fault()
    if fault is not None:
        return _fault_text(fault), CONTENT_TYPE
    if is_multiprocess():
        return multiprocess_text()
    shown = registry if exporter is None else _WithoutCreated(registry, exporter)
    if "application/openmetrics-text" not in accept:
        return generate_latest(shown), CONTENT_TYPE
    encode, content_type = choose_encoder(accept)
    return _with_colons(encode(shown), () if exporter is None else exporter.families), content_type


def multiprocess_text(directory: str | None = None) -> tuple[bytes, str]:
    """The series that processes wrote to a directory (None: PROMETHEUS_MULTIPROC_DIR); a comment where it cannot be read."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    try:
        MultiProcessCollector(registry, directory)  # type: ignore[no-untyped-call]
        return generate_latest(registry), CONTENT_TYPE
    except (OSError, ValueError, LookupError, RuntimeError, struct.error) as error:  # all that a damaged or foreign file gives
        return _fault_text(f"{type(error).__name__}: {error}"), CONTENT_TYPE


def _fault_text(fault: str) -> bytes:
    logger.error("Metrics cannot be read: %s", fault)
    return f"# pagedcore: metrics cannot be read: {json.dumps(fault)}\n".encode()


def _with_colons(text: bytes, names: Iterable[str]) -> bytes:
    """prometheus_client writes a colon in the name of an OpenMetrics sample as an underscore, for scrapers that say nothing of UTF-8."""
    for name in names:
        if ":" in name:
            text = text.replace(b"\n" + name.replace(":", "_").encode(), b"\n" + name.encode())
    return text


class _WithoutCreated:
    """A registry without the `_created` series of our families, which a multi-process scrape does not have either."""

    def __init__(self, registry: CollectorRegistry, exporter: Exporter) -> None:
        self._registry = registry
        self._exporter = exporter

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            if self._exporter.is_ours(metric.name):
                metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
