"""What an engine counts, on its way to the registry of the process that owns it: that process alone writes it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from pagedcore.metrics_compat.ledgers import ledger_for
from pagedcore.observe.ledger import Exemplar, Key, Ledger
from pagedcore.observe.prometheus import EngineSink, Exporter, exporter_for, multiprocess_dir_fault
from pagedcore.observe.recorder import Recorder, RecorderInfo
from pagedcore.remote.frames import Numbers, Welcome

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)


class ForwardedNumbers:
    """The `Sink` of a ledger whose registry is elsewhere. Owns what was not sent yet."""

    def __init__(self) -> None:
        self._numbers = Numbers()
        self._histograms: set[Key] = set()

    def add(self, key: Key, amount: float) -> None:
        self._numbers.adds.append((key, amount))

    def set(self, key: Key, value: float) -> None:
        self._numbers.sets.append((key, value))

    def observe(self, key: Key, counts: dict[int, int], total: float, exemplars: dict[int, Exemplar]) -> None:
        if counts or exemplars or key not in self._histograms:
            self._histograms.add(key)  # an untouched one is shown, too
            self._numbers.observations.append((key, counts, total, exemplars))

    def take(self) -> Numbers | None:
        """What came since the last call; None for nothing."""
        numbers, self._numbers = self._numbers, Numbers()
        return numbers if numbers.adds or numbers.sets or numbers.observations else None


class ForwardingRecorder(Recorder):
    """A recorder in the engine's own process: it writes to no registry, and sends what it would write."""

    def __init__(self, info: RecorderInfo, *, send: Callable[[Numbers], None], ledger: Ledger | None = None) -> None:
        self._send = send
        self._forwarded = ForwardedNumbers()
        super().__init__(info, ledger=ledger)

    def _open_export(self, registry: CollectorRegistry | None) -> tuple[None, EngineSink]:
        return None, cast("EngineSink", self._forwarded)

    def _export(self, now_s: float) -> None:
        super()._export(now_s)
        numbers = self._forwarded.take()
        if numbers is not None:
            self._send(numbers)


class Mirror:
    """The other end: owns the children of one engine in this process' registry, over all restarts of the engine.

    Where they cannot be written the fault is logged once, as a `Recorder` does.
    """

    def __init__(self, welcome: Welcome, flush: Callable[[], None]) -> None:
        """`flush` brings what the engine counted up to date; a scrape calls it. The engine's label is then `engine`."""
        self.flush = flush
        self.engine = welcome.engine
        self._model_name = welcome.plan.model_name
        self._families = ledger_for(welcome.plan.config.metrics_compat).families
        self._gauges: dict[Key, float] = {}
        self._lock = threading.Lock()
        self._exporter, self._sink = self._open_export()

    def take(self, numbers: Numbers) -> None:
        """Write what the engine counted since the last ones."""
        with self._lock:
            self._gauges.update(numbers.sets)
            if self._sink is None:
                return
            try:
                _apply(numbers, self._sink)
            except (OSError, ValueError) as error:
                self._stop_export(f"{type(error).__name__}: {error}")

    def lose(self) -> None:
        """The engine is gone: what it had is nothing now. Its counters, and the hit rates that follow from them, stay."""
        self.take(Numbers(sets=[(key, 0.0) for key in self._gauges if "hit_rate" not in key[0]]))

    def close(self) -> None:
        """Give the label back; may be called twice."""
        with self._lock:
            exporter, self._exporter, self._sink = self._exporter, None, None
        if exporter is not None:
            exporter.release(self._model_name, self.engine)

    def _open_export(self) -> tuple[Exporter | None, EngineSink | None]:
        fault = multiprocess_dir_fault()
        if fault is not None:
            self._stop_export(fault)
            return None, None
        try:
            exporter = exporter_for()
            exporter.offer(self._families)
        except ValueError as error:
            self._stop_export(f"The registry already holds a metric of our name: {error}")
            return None, None
        self.engine = exporter.claim(self._model_name, self.engine, self)
        return exporter, EngineSink(exporter, self._model_name, self.engine)

    def _stop_export(self, fault: str) -> None:
        self._sink = None
        logger.error("Metrics of engine %s are counted but not exported: %s", self.engine, fault)


def _apply(numbers: Numbers, sink: EngineSink) -> None:
    for key, amount in numbers.adds:
        sink.add(key, amount)
    for key, value in numbers.sets:
        sink.set(key, value)
    for key, counts, total, exemplars in numbers.observations:
        sink.observe(key, counts, total, exemplars)
