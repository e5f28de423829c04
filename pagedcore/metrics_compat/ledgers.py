"""Ledgers that keep their numbers under a second set of names too."""

from __future__ import annotations

from collections.abc import Sequence

from pagedcore.core.events import Finished
from pagedcore.metrics_compat.vllm_names import COUNTERS, GAUGES, HISTOGRAMS, VLLM_FAMILIES, WAITING_BY_REASON
from pagedcore.observe.catalogue import FAMILIES, WAITING_REASONS
from pagedcore.observe.ledger import Ledger, Sink

CAPACITY_REASONS = tuple(reason for reason in WAITING_REASONS if reason != "tenant_quota")


class VllmLedger(Ledger):
    """A ledger that also counts, sets and observes what stands under vLLM's names, at the same moment and by the same amount."""

    def __init__(self) -> None:
        super().__init__({**FAMILIES, **VLLM_FAMILIES})

    def add(self, name: str, amount: float, *labels: str) -> None:
        super().add(name, amount, *labels)
        for other, relabel in COUNTERS.get(name, ()):
            values = relabel(*labels)
            if values is not None:
                super().add(other, amount, *values)

    def set(self, name: str, value: float, *labels: str) -> None:
        super().set(name, value, *labels)
        for other, relabel in GAUGES.get(name, ()):
            values = relabel(*labels)
            if values is not None:
                super().set(other, value, *values)

    def observe(self, name: str, value: float, trace_id: str | None = None) -> None:
        super().observe(name, value, trace_id)
        if name in HISTOGRAMS:
            super().observe(HISTOGRAMS[name], value, trace_id)

    def observe_many(self, name: str, values: Sequence[float]) -> None:
        super().observe_many(name, values)
        if name in HISTOGRAMS:
            super().observe_many(HISTOGRAMS[name], values)

    def note_end(self, event: Finished) -> None:
        """Its lengths and stretches, if it was admitted and had a token."""
        if event.admitted_s is None:
            return
        super().observe("vllm:request_prompt_tokens", len(event.request.prompt_token_ids))
        super().observe("vllm:request_generation_tokens", event.num_output_tokens)
        if event.first_token_s is not None and event.last_token_s is not None:
            super().observe("vllm:request_prefill_time_seconds", event.first_token_s - event.admitted_s)
            super().observe("vllm:request_decode_time_seconds", event.last_token_s - event.first_token_s)
            super().observe("vllm:request_inference_time_seconds", event.last_token_s - event.admitted_s)

    def export(self, sink: Sink) -> None:
        super().set("vllm:num_requests_waiting", self._sum("pagedcore_open_requests", "waiting", "swapped"))
        super().set(WAITING_BY_REASON, self._sum("pagedcore_waiting_requests", *CAPACITY_REASONS), "capacity")
        super().set(WAITING_BY_REASON, self._sum("pagedcore_waiting_requests", "tenant_quota"), "deferred")
        super().export(sink)

    def _sum(self, name: str, *values: str) -> float:
        return sum(self.gauge(name, value) or 0.0 for value in values)


def ledger_for(metrics_compat: str | None) -> Ledger:
    """The ledger of the setting `metrics_compat`."""
    return Ledger() if metrics_compat is None else VllmLedger()
