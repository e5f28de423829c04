"""What an engine counts, on its way to the registry of the process that owns it: that process alone writes it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from pagedcore.core.events import Finished
from pagedcore.messages import AddRequest
from pagedcore.metrics_compat.ledgers import ledger_for
from pagedcore.observe.ledger import Exemplar, Key, Ledger
from pagedcore.observe.prometheus import EngineSink, Exporter, exporter_for, multiprocess_dir_fault
from pagedcore.observe.recorder import Recorder, RecorderInfo
from pagedcore.remote.frames import Numbers, Welcome
from pagedcore.remote.lost_requests import LostBook, Uncounted, lost_ends
from pagedcore.remote.open_requests import OpenRequest

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PROMPT_TOKENS_LEFT = {
    "pagedcore_prefix_cache_queries_tokens_total": 1,
    "pagedcore_prefix_cache_hit_tokens_total": -1,
    "pagedcore_computed_prompt_tokens_total": -1,
    "pagedcore_abandoned_prompt_tokens_total": -1,
}
"""How each counter changes the number of prompt tokens that were looked up and whose fate is still open."""

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

    def end(self, request_id: str, *, is_request_counted: bool) -> None:
        """A choice has ended, and is in what is taken next."""
        self._numbers.ended.append((request_id, is_request_counted))

    def take(self) -> Numbers | None:
        """What came since the last call; None for nothing."""
        numbers, self._numbers = self._numbers, Numbers()
        return numbers if numbers.adds or numbers.sets or numbers.observations or numbers.ended else None


class ForwardingRecorder(Recorder):
    """A recorder in the engine's own process: it writes to no registry, and sends what it would write."""

    def __init__(self, info: RecorderInfo, *, send: Callable[[Numbers], None], ledger: Ledger | None = None) -> None:
        self._send = send
        self._forwarded = ForwardedNumbers()
        super().__init__(info, ledger=ledger)

    def _open_export(self, registry: CollectorRegistry | None) -> tuple[None, EngineSink]:
        return None, cast("EngineSink", self._forwarded)

    def _make_handlers(self) -> dict[type, Callable[[Any], object]]:
        return {**super()._make_handlers(), Finished: self._finished}

    def _finished(self, event: Finished) -> None:
        is_request_counted = self._requests.finished(event)
        self._forwarded.end(event.request.request_id, is_request_counted=is_request_counted)

    def received(self, request: AddRequest) -> None:
        """Who hands it over has counted it."""

    def _export(self, now_s: float) -> None:
        super()._export(now_s)
        numbers = self._forwarded.take()
        if numbers is not None:
            self._send(numbers)


class Mirror:
    """The other end: owns the children of one engine in this process' registry, over all restarts of the engine, and what its
    process could not count any more when it died.

    Where they cannot be written the fault is logged once, as a `Recorder` does.
    """

    def __init__(self, welcome: Welcome, flush: Callable[[], None]) -> None:
        """`flush` brings what the engine counted up to date; a scrape calls it. The engine's label is then `engine`."""
        self.flush = flush
        self.engine = welcome.engine
        self._model_name = welcome.plan.model_name
        ledger = ledger_for(welcome.plan.config.metrics_compat)
        self._families = ledger.families
        self._lost = LostBook(ledger)
        self._num_prompt_tokens_left = 0.0
        self.uncounted = Uncounted()
        self._gauges: dict[Key, float] = {}
        self._lock = threading.Lock()
        self._exporter, self._sink = self._open_export()

    def open(self, choice: OpenRequest) -> None:
        """The engine is about to get it. Traffic is written at once: what this process had received is known, however it ends."""
        if choice.request.is_traffic is not False:
            self.uncounted.open(choice)
            if choice.request.choice_index == 0:
                self._receive(choice.request)

    def count_lost(self, ends: Sequence[Finished]) -> None:
        """Requests that never came to the engine, since who was to hand them over has ended."""
        lost = ForwardedNumbers()
        for request in {end.request.group_id: end.request for end in ends}.values():
            self._receive(request)
        with self._lock:
            self._lost.count(ends, 0, lost)
            numbers = lost.take() or Numbers()
            numbers.sets = []  # they are the engine's
            self._write(numbers)

    def take(self, numbers: Numbers) -> None:
        """Write what the engine counted since the last ones."""
        with self._lock:
            self._gauges.update(numbers.sets)
            self._num_prompt_tokens_left += sum(PROMPT_TOKENS_LEFT.get(key[0], 0) * amount for key, amount in numbers.adds)
            self._write(numbers)
        self.uncounted.note_ended(numbers.ended)

    def lose(self) -> None:
        """The engine is gone: what it had is nothing now, and what it had not counted of its requests is.

        Its counters, and the hit rates that follow from them, stay. May be called twice.
        """
        lost = ForwardedNumbers()
        with self._lock:
            num_tokens, self._num_prompt_tokens_left = round(self._num_prompt_tokens_left), 0.0
            self._lost.count(lost_ends(self.uncounted.take(), time.monotonic()), num_tokens, lost)
            numbers = lost.take() or Numbers()
            numbers.sets = [(key, value) for key in self._gauges if (value := _value_without_engine(key)) is not None]
            self._write(numbers)

    def close(self) -> None:
        """Give the label back; may be called twice."""
        with self._lock:
            exporter, self._exporter, self._sink = self._exporter, None, None
        if exporter is not None:
            exporter.release(self._model_name, self.engine)

    def _receive(self, request: AddRequest) -> None:
        received = ForwardedNumbers()
        self._lost.received(request, received)
        self._write(received.take() or Numbers())

    def _write(self, numbers: Numbers) -> None:
        sink = self._sink  # `open` holds no lock: another thread may close meanwhile
        if sink is None:
            return
        try:
            _apply(numbers, sink)
        except Exception as error:  # noqa: BLE001  the registry and its files are the host's
            self._stop_export(f"{type(error).__name__}: {error}")

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


def _value_without_engine(key: Key) -> float | None:
    """Of a gauge; None for one that stays."""
    if "hit_rate" not in key[0]:
        return 0.0
    return math.nan if key[-1] == "1m" else None


def _apply(numbers: Numbers, sink: EngineSink) -> None:
    for key, amount in numbers.adds:
        sink.add(key, amount)
    for key, value in numbers.sets:
        sink.set(key, value)
    for key, counts, total, exemplars in numbers.observations:
        sink.observe(key, counts, total, exemplars)
