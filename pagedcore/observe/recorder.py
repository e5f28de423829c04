"""Everything one engine tells about itself: events in, exact numbers out."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagedcore.core.events import BlockEvicted, BlocksForgotten, Event, StepEvents
from pagedcore.guard import Guard
from pagedcore.messages import AddRequest
from pagedcore.observe.catalogue import INFO_LABELS, LEVELS, MEMORY_KINDS, PENALTY_REASONS
from pagedcore.observe.ledger import Handlers, Ledger
from pagedcore.observe.lookups import LookupBook
from pagedcore.observe.prometheus import EngineSink, Exporter, exporter_for, multiprocess_dir_fault
from pagedcore.observe.requests import RequestBook
from pagedcore.observe.stats import StatsSnapshot
from pagedcore.observe.steps import StepBook
from pagedcore.observe.window import CacheTotals, RateWindow
from pagedcore.outputs import CacheReport

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

MAX_FAILED_WRITES = 8
"""Without an export between them that brought all; then the export is given up, as that of a file that is damaged."""
FLUSH_INTERVAL_S = 0.25
"""While requests run, exported numbers are at most this old (a scrape of the same process flushes first)."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderInfo:
    """What an engine is: the labels of its metrics, and the settings that `pagedcore_engine_info` shows."""

    model_name: str
    engine: str = "0"
    """Name of this engine among others (worker, replica). A second engine of this name in one process gets `-2`."""
    version: str = ""
    backend: str = ""
    block_size: int = 16
    num_blocks: int = 0
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    linear_backend: str = "torch"
    device: str = "cpu"
    device_memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """weights, kv_cache, graphs, activations -> bytes; the total is their sum."""


class Recorder:
    """Owns every number of one engine. `record` belongs to the engine thread; the other methods may be called from any.

    Counts are exact and kept here; prometheus objects are brought up to date by `flush`. When they cannot be written (`OSError`,
    `ValueError`) the fault is logged once, `export_fault` says why, and counting goes on: inference never pays for it. Any other error
    of theirs costs that one write, and is such a fault when it goes on (`MAX_FAILED_WRITES`).
    """

    def __init__(
        self,
        info: RecorderInfo,
        *,
        registry: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
    ) -> None:
        """`ledger` is one that keeps more families; None keeps the catalogue's."""
        self._info, self._clock, self._lock = info, clock, threading.Lock()
        self._ledger = Ledger() if ledger is None else ledger
        self._lookups = LookupBook(self._ledger, info.num_blocks)
        self._requests = RequestBook(self._ledger, self._lookups)
        self._steps = StepBook(self._ledger, info.block_size)
        self._window = RateWindow()
        self._handlers = self._make_handlers()
        self._guard = Guard("Something that happened in an engine could not be counted, or not be exported.")
        self._listeners: list[tuple[Guard, Callable[[StepEvents], None]]] = []
        self._started_s = self._last_flush_s = self._last_record_s = clock()
        self._memory: dict[str, int] = {}
        self._is_closed, self._num_failed_writes = False, 0
        self.export_fault: str | None = None
        self.engine = info.engine
        self._exporter, self._sink = self._open_export(registry)
        self._ledger.set("pagedcore_engine_info", 1, *(str(getattr(info, name)) for name in INFO_LABELS))
        self.set_device_memory(info.device_memory_bytes)
        self.flush()

    # ---- the engine thread

    def record(self, step: StepEvents) -> None:
        """Count everything since the last call and fill in `step.avoidable_tokens`. Exports at once when the engine is idle.

        An event that cannot be counted costs no other event, and listeners hear of the step in any case.
        """
        try:
            with self._lock:
                self._count(step, self._clock())
        finally:
            for guard, listener in self._listeners:
                guard(listener, step)

    def remember(self, gone: Iterable[BlockEvicted | BlocksForgotten]) -> None:
        """Blocks have left the cache while nothing is counted: later misses say why."""
        with self._lock:
            self._guard.each(self._handle, gone)
            self._lookups.remember_evictions(counts=False)

    @property
    def model_name(self) -> str:
        return self._info.model_name

    def maybe_flush(self, now_s: float) -> None:
        """Export if the last export is at least `FLUSH_INTERVAL_S` old."""
        if now_s - self._last_flush_s >= FLUSH_INTERVAL_S:
            with self._lock:
                self._export(now_s)

    # ---- any thread

    def add_listener(self, listener: Callable[[StepEvents], None]) -> None:
        """Call it after each batch of events, on the engine thread: it keeps what it needs and returns. What it raises is logged."""
        self._listeners.append((Guard("Whoever listens to an engine failed, and may not know all that happened."), listener))

    def flush(self) -> None:
        """Export everything counted so far, with the windows moved to now."""
        with self._lock:
            self._export(self._clock())

    def received(self, request: AddRequest) -> None:
        """A request comes to the engine thread, which may not have taken it for a while. Exported at once."""
        key = self._requests.received_key(request)
        self._write(lambda sink: sink.add(key, 1))

    def stats(self) -> StatsSnapshot:
        """Every number of this engine now; needs no prometheus_client object."""
        with self._lock:
            return self._snapshot()

    def open_requests(self) -> list[AddRequest]:
        """Choices that have arrived and not ended."""
        with self._lock:
            return self._requests.open_requests()

    def cache_report(self, request_id: str) -> CacheReport | None:
        """Where a request's prompt tokens came from and why blocks missed: of running requests and the last 1,024 ended ones.

        None for others, and for choices i > 0 of n, which have no lookup of their own.
        """
        explained = self.explained(request_id)
        return None if explained is None else explained[0]

    def explained(self, request_id: str) -> tuple[CacheReport, tuple[str, ...]] | None:
        """The same report, and the reason of each missed eligible block in order of position."""
        with self._lock:
            lookup = self._lookups.store.find(request_id)
            return None if lookup is None else (lookup.report, lookup.misses.reasons)

    def recent_rates(self) -> dict[str, float]:
        """Hit rates of the last minute by level, "ideal" beside them; NaN where nothing was looked up."""
        with self._lock:
            totals, start = self._totals(), self._window.start(self._clock())
        return {level: totals.rate_since(level, start) for level in (*LEVELS, "ideal")}

    def complete(self, report: CacheReport, request_id: str) -> CacheReport:
        """The core's report with the reasons of its misses added; the same one where nothing is known."""
        with self._lock:
            lookup = self._lookups.store.find(request_id)
        if lookup is None or not lookup.misses.reasons or not report.num_eligible_blocks:  # of one that was never admitted
            return report
        known = lookup.report
        return dataclasses.replace(
            report, miss_blocks=known.miss_blocks, diverged_at_token=known.diverged_at_token, evicted_age_s=known.evicted_age_s
        )

    def set_device_memory(self, bytes_by_kind: Mapping[str, int]) -> None:
        """Say what the engine holds on the device, by kind; kinds left out hold nothing."""
        with self._lock:
            self._memory = {kind: bytes_by_kind.get(kind, 0) for kind in MEMORY_KINDS if kind != "total"}
            for kind, num_bytes in self._memory.items():
                self._ledger.set("pagedcore_device_memory_bytes", num_bytes, kind)
            self._ledger.set("pagedcore_device_memory_bytes", sum(self._memory.values()), "total")

    def set_device_utilization(self, ratio: float) -> bool:
        """Say how busy the device is by its driver's count. False when the recorder is closed: nobody need ask any more."""
        with self._lock:
            if not self._is_closed:
                self._ledger.set("pagedcore_device_utilization_ratio", ratio)
            return not self._is_closed

    def close(self) -> None:
        """Export a last time, with the gauges of a live engine at 0, and give the `engine` label back. May be called twice."""
        with self._lock:
            self._is_closed = True
            self._requests.close()
            self._steps.latest = StepEvents(now_s=self._clock())
            if self._ledger.gauge("pagedcore_device_utilization_ratio") is not None:
                self._ledger.set("pagedcore_device_utilization_ratio", 0)
        self._ledger.set("pagedcore_engine_info", 0, *(str(getattr(self._info, name)) for name in INFO_LABELS))
        self.set_device_memory({})
        self.flush()
        with self._lock:
            exporter, self._exporter, self._sink = self._exporter, None, None
        if exporter is not None:
            exporter.release(self._info.model_name, self.engine)

    # ---- under the lock

    def _make_handlers(self) -> Handlers:
        return {**self._requests.handlers(), **self._lookups.handlers()}

    def _count(self, step: StepEvents, now_s: float) -> None:
        if math.floor(now_s) > math.floor(self._last_record_s):
            self._window.sample(self._last_record_s, self._totals())
        self._last_record_s = now_s
        self._guard.each(self._handle, step.events)
        if self._requests.just_counted:
            self._export_ends()
        self._lookups.remember_evictions()
        if step.step_id is not None:
            step.avoidable_tokens = self._lookups.take_avoidable(step.step_id)
        self._steps.record(step)
        if not (step.num_running or step.num_waiting) or now_s - self._last_flush_s >= FLUSH_INTERVAL_S:
            self._export(now_s)

    def _handle(self, event: Event) -> None:
        handler = self._handlers.get(type(event))  # others have no number of their own
        if handler is not None:
            handler(event)

    def _open_export(self, registry: CollectorRegistry | None) -> tuple[Exporter | None, EngineSink | None]:
        fault = multiprocess_dir_fault()
        if fault is not None:
            self._stop_export(fault)
            return None, None
        try:
            exporter = exporter_for(registry)
            exporter.offer(self._ledger.families)
        except ValueError as error:
            self._stop_export(f"The registry already holds a metric of our name: {error}")
            return None, None
        self.engine = exporter.claim(self._info.model_name, self._info.engine, self)
        return exporter, EngineSink(exporter, self._info.model_name, self.engine)

    def _stop_export(self, fault: str) -> None:
        self.export_fault = fault
        self._sink = None
        logger.error("Metrics of engine %s are counted but not exported: %s", self.engine, fault)

    def _export(self, now_s: float) -> None:
        self._last_flush_s = now_s
        self._set_gauges(now_s)
        self._write(self._export_all)

    def _export_all(self, sink: EngineSink) -> None:
        self._ledger.export(sink)
        self._num_failed_writes = 0

    def _export_ends(self) -> None:
        """Before their callers hear of them: what a killed process had received and not ended is then what its callers wait for."""
        keys, self._requests.just_counted = self._requests.just_counted, []
        self._write(lambda sink: self._ledger.export_counters(sink, keys))

    def _write(self, export: Callable[[EngineSink], None]) -> None:
        sink = self._sink  # `received` holds no lock: another thread may close meanwhile
        try:
            if sink is not None:
                export(sink)
        except Exception as error:  # noqa: BLE001  the registry and its files are the host's
            self._num_failed_writes += 1
            if isinstance(error, OSError | ValueError) or self._num_failed_writes >= MAX_FAILED_WRITES:
                self._stop_export(f"{type(error).__name__}: {error}")
            else:  # of this write alone, unless it goes on so
                self._guard.tell(error, self._write)

    def _set_gauges(self, now_s: float) -> None:
        totals, put = self._totals(), self._ledger.set
        self._window.sample(self._last_record_s, totals)
        self._steps.set_gauges()
        self._lookups.observe_evictions()
        for window, start in (("1m", self._window.start(now_s)), ("total", CacheTotals())):
            for level in LEVELS:
                put("pagedcore_cache_level_hit_rate", totals.rate_since(level, start), level, window)
            put("pagedcore_cache_ideal_hit_rate", totals.rate_since("ideal", start), window)
        put("pagedcore_cache_hit_rate", totals.rate_since("prefix", CacheTotals()))

    def _totals(self) -> CacheTotals:
        count, by = self._ledger.count, self._ledger.sum_over_labels
        acquired = by("pagedcore_pool_acquired_blocks_total", "kind")
        return CacheTotals(
            page_hits=count("pagedcore_page_hits_total"),
            page_lookups=count("pagedcore_page_lookups_total"),
            hit_tokens=sum(by("pagedcore_prefix_cache_hit_tokens_total", "source").values()),
            query_tokens=sum(by("pagedcore_prefix_cache_queries_tokens_total", "tenant").values()),
            reused_blocks=acquired["reused"],
            acquired_blocks=sum(acquired.values()),
            ideal_hit_tokens=count("pagedcore_prefix_cache_ideal_hit_tokens_total"),
        )

    def _snapshot(self) -> StatsSnapshot:
        count, by, steps = self._ledger.count, self._ledger.sum_over_labels, self._steps
        totals, latest = self._totals(), steps.latest
        return StatsSnapshot(
            elapsed_s=self._clock() - self._started_s,
            num_steps=steps.num_steps,
            num_finished=by("pagedcore_requests_total", "status"),
            num_rejected=by("pagedcore_rejected_requests_total", "reason"),
            num_preemptions=count("pagedcore_preemptions_total"),
            prefix_cache_query_tokens=totals.query_tokens,
            prefix_cache_hit_tokens=totals.hit_tokens,
            prefix_cache_hit_tokens_by_source=by("pagedcore_prefix_cache_hit_tokens_total", "source"),
            ideal_hit_tokens=totals.ideal_hit_tokens,
            computed_prompt_tokens=count("pagedcore_computed_prompt_tokens_total"),
            abandoned_prompt_tokens=count("pagedcore_abandoned_prompt_tokens_total"),
            page_lookups=totals.page_lookups,
            page_hits=totals.page_hits,
            pool_acquired_reused_blocks=totals.reused_blocks,
            pool_acquired_fresh_blocks=totals.acquired_blocks - totals.reused_blocks,
            pool_ghost_hits=count("pagedcore_pool_ghost_hits_total"),
            pool_evictions=count("pagedcore_pool_evictions_total"),
            miss_blocks=by("pagedcore_cache_miss_blocks_total", "reason"),
            swapped_blocks=by("pagedcore_swapped_blocks_total", "direction"),
            miss_penalty_tokens=by("pagedcore_miss_penalty_tokens_total", "reason"),
            miss_penalty_seconds={r: self._ledger.seconds("pagedcore_miss_penalty_seconds_total", r) for r in PENALTY_REASONS},
            prompt_tokens=sum(by("pagedcore_prompt_tokens_total", "tenant").values()),
            generation_tokens=sum(by("pagedcore_generation_tokens_total", "tenant").values()),
            sampled_tokens=steps.num_sampled_tokens,
            recomputed_tokens=count("pagedcore_recomputed_tokens_total"),
            discarded_tokens=count("pagedcore_discarded_tokens_total"),
            num_running=latest.num_running,
            num_waiting=latest.num_waiting,
            num_waiting_by_reason=dict(latest.waiting_by_reason),
            num_active_blocks=latest.num_active_blocks,
            num_cached_blocks=latest.num_cached_blocks,
            num_free_blocks=latest.num_free_blocks,
            kv_cache_usage=steps.kv_cache_usage,
            kv_utilization=steps.kv_utilization,
            device_memory_bytes=sum(self._memory.values()),
            device_memory_bytes_by_kind=dict(self._memory),
        )
