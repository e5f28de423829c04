"""The one place that touches prometheus_client: families once a registry, children once an engine."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pagedcore.observe.catalogue import BASE_LABELS, FAMILIES, Family
from pagedcore.observe.ledger import Exemplar, Key

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    Metric = Counter | Gauge | Histogram


class Flushable(Protocol):
    """An engine's recorder, as the exporter sees it."""

    def flush(self) -> None: ...


class Exporter:
    """Owns our families in one registry, and who writes to them. Made once a registry by `exporter_for`.

    Raises `ValueError` when the host has registered one of our names itself.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.families: dict[str, Metric] = {}
        self._registry = registry
        self._writers: weakref.WeakValueDictionary[tuple[str, str], Flushable] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self.offer(FAMILIES)

    def offer(self, families: Mapping[str, Family]) -> None:
        """Make those that are not there yet; raises `ValueError` when the host has one of the names."""
        with self._lock:
            for name, family in families.items():
                if name not in self.families:
                    self.families[name] = _make(family, self._registry)

    def is_ours(self, metric_name: str) -> bool:
        """Whether prometheus_client calls a family of ours so: counters without their suffix."""
        return metric_name in self.families or f"{metric_name}_total" in self.families

    def claim(self, model_name: str, engine: str, writer: Flushable) -> str:
        """Take an `engine` label for a writer: the one asked for or, while another engine of this process has it, `-2`, `-3`, ... added."""
        with self._lock:
            label, number = engine, 1
            while (model_name, label) in self._writers:
                number += 1
                label = f"{engine}-{number}"
            self._writers[model_name, label] = writer
        return label

    def release(self, model_name: str, engine: str) -> None:
        """Give a label back; unknown ones are ignored."""
        with self._lock:
            self._writers.pop((model_name, engine), None)

    def flush(self) -> None:
        """Make what every engine of this process counted visible."""
        with self._lock:
            writers = list(self._writers.values())
        for writer in writers:
            writer.flush()


class EngineSink:
    """Owns the children of one engine; the `Sink` of its ledger. Raises `OSError` or `ValueError` when they cannot be written."""

    def __init__(self, exporter: Exporter, model_name: str, engine: str) -> None:
        self._families = exporter.families
        self._base = (model_name, engine)
        self._children: dict[Key, Metric] = {}

    def _child(self, key: Key) -> Metric:
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._families[key[0]].labels(*self._base, *key[1:])
        return child

    def add(self, key: Key, amount: float) -> None:
        counter: Counter = self._child(key)  # type: ignore[assignment]
        counter.inc(amount)

    def set(self, key: Key, value: float) -> None:
        gauge: Gauge = self._child(key)  # type: ignore[assignment]
        gauge.set(value)

    def observe(self, key: Key, counts: dict[int, int], total: float, exemplars: dict[int, Exemplar]) -> None:
        histogram: Histogram = self._child(key)  # type: ignore[assignment]
        if counts:
            add_observations(histogram, counts, total)
        for index, (value, trace_id) in exemplars.items():
            set_exemplar(histogram, index, value, trace_id)


_exporters: weakref.WeakKeyDictionary[CollectorRegistry, Exporter] = weakref.WeakKeyDictionary()
_exporters_lock = threading.Lock()


def exporter_for(registry: CollectorRegistry | None = None) -> Exporter:
    """The exporter of a registry (None: prometheus_client's default one), made at the first call."""
    registry = default_registry() if registry is None else registry
    with _exporters_lock:
        exporter = _exporters.get(registry)
        if exporter is None:
            exporter = _exporters[registry] = Exporter(registry)
        return exporter


def known_exporter(registry: CollectorRegistry) -> Exporter | None:
    """The exporter of a registry, if an engine of this process writes to it."""
    with _exporters_lock:
        return _exporters.get(registry)


def default_registry() -> CollectorRegistry:
    from prometheus_client import REGISTRY

    return REGISTRY


def _make(family: Family, registry: CollectorRegistry) -> Metric:
    from prometheus_client import Counter, Gauge, Histogram

    labels = (*BASE_LABELS, *family.labels)
    if family.kind == "counter":
        return Counter(family.name, family.help, labels, registry=registry)
    if family.kind == "gauge":
        return Gauge(family.name, family.help, labels, registry=registry, multiprocess_mode="livemostrecent")
    return Histogram(family.name, family.help, labels, registry=registry, buckets=family.buckets)


# What prometheus_client does not offer in public; tests/observe/test_touchpoints.py holds each of these.


def add_observations(histogram: Histogram, counts: dict[int, int], total: float) -> None:
    """What observing each value would do, for many at once: bucket index -> how many, and the sum of the values."""
    for index, num in counts.items():
        histogram._buckets[index].inc(num)  # noqa: SLF001
    histogram._sum.inc(total)  # noqa: SLF001


def set_exemplar(histogram: Histogram, index: int, value: float, trace_id: str) -> None:
    """Make a value its bucket's exemplar; a multi-process set-up has none and takes none."""
    from prometheus_client.samples import Exemplar

    histogram._buckets[index].set_exemplar(Exemplar({"trace_id": trace_id}, value, time.time()))  # noqa: SLF001


def is_multiprocess() -> bool:
    """Whether prometheus_client was imported with PROMETHEUS_MULTIPROC_DIR set; setting it later changes nothing."""
    from prometheus_client import values

    return bool(values.ValueClass._multiprocess)  # noqa: SLF001


def multiprocess_dir_fault() -> str | None:
    """Why the directory of a multi-process set-up cannot be used; None when it can, or in a plain process."""
    if not is_multiprocess():
        return None
    path = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not path:
        return "PROMETHEUS_MULTIPROC_DIR was set when prometheus_client was imported and is not set now."
    if not Path(path).is_dir():
        return f"PROMETHEUS_MULTIPROC_DIR is {path!r}, which is not a directory; create it on a local disk before the engine starts."
    return None
