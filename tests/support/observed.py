"""Builders for what the core tells `observe`: hashes, lookups, requests and steps by hand, on a clock that tests move."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from pagedcore.core.events import Admitted, Arrived, Event, Finished, StepEvents
from pagedcore.core.lookup import BlockHash, LookupReport
from pagedcore.messages import AddRequest
from pagedcore.observe.exposition import metrics_text
from pagedcore.observe.ledger import Ledger
from pagedcore.observe.recorder import Recorder, RecorderInfo
from pagedcore.sampling_params import SamplingParams

BLOCK_SIZE = 4


class FakeClock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Engine:
    """A recorder with its own registry and clock, fed by hand."""

    def __init__(
        self, *, registry: CollectorRegistry | None = None, clock: FakeClock | None = None, ledger: Ledger | None = None, **info: Any
    ) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self.clock = clock or FakeClock()
        settings = {"model_name": "m", "block_size": BLOCK_SIZE, "num_blocks": 64, **info}
        self.recorder = Recorder(RecorderInfo(**settings), registry=self.registry, clock=self.clock, ledger=ledger)

    def step(self, *events: Event, **facts: Any) -> StepEvents:
        """Record one batch. Something runs unless the facts say otherwise, so nothing is exported by being idle."""
        batch = StepEvents(now_s=self.clock.now_s, events=list(events), **{"num_running": 1, **facts})
        self.recorder.record(batch)
        return batch

    def serve(self, name: str, lookup: LookupReport, *, computed: int | None = None, abandoned: int = 0, **fields: Any) -> None:
        """One request from arrival to end, at one moment."""
        request = make_add(name, num_tokens=lookup.num_prompt_tokens, arrival_s=self.clock.now_s, **fields)
        computed = lookup.num_prompt_tokens - lookup.num_hit_tokens - abandoned if computed is None else computed
        now_s = self.clock.now_s
        self.step(
            Arrived(request, now_s),
            Admitted(name, now_s, lookup),
            make_finished(request, now_s, num_computed_prompt_tokens=computed, num_abandoned_prompt_tokens=abandoned),
        )

    def samples(self) -> dict[str, float]:
        return samples_of_registry(self.registry)

    def value(self, name: str, **labels: str) -> float:
        """One sample of this engine."""
        return self.samples()[sample_key(name, {"model_name": "m", "engine": self.recorder.engine, **labels})]


def sample_key(name: str, labels: dict[str, str]) -> str:
    return name + "{" + ",".join(f"{k}={v}" for k, v in sorted(labels.items())) + "}"


def samples_of_registry(registry: CollectorRegistry) -> dict[str, float]:
    """What a scrape of this process shows."""
    return samples_of(metrics_text(registry)[0].decode())


def samples_of(text: str) -> dict[str, float]:
    """Sample name and labels -> value. A sample that comes twice is an error."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample_key(sample.name, sample.labels)
            assert key not in found, f"{key} comes twice"
            found[key] = sample.value
    return found


def block_hash(name: str) -> BlockHash:
    return BlockHash(hashlib.sha256(name.encode()).digest())


def missed(*blocks: str) -> tuple[tuple[BlockHash, bool, bool], ...]:
    """Missed blocks by name; `name!` is resident behind a hole, `name?` is being computed by another request."""
    return tuple((block_hash(b.rstrip("!?")), b.endswith("!"), b.endswith("?")) for b in blocks)


def make_lookup(*blocks: str, live: int = 0, pool: int = 0, tail: int = 1, sibling: int | None = None) -> LookupReport:
    """A lookup of `live + pool` served and then the missed blocks, and `tail` prompt tokens behind the last eligible block."""
    num_blocks = live + pool + len(blocks)
    return LookupReport(
        num_prompt_tokens=num_blocks * BLOCK_SIZE + tail,
        block_size=BLOCK_SIZE,
        num_eligible_blocks=num_blocks,
        num_resident_blocks=live + pool + sum(b.endswith("!") for b in blocks),
        live_blocks=live,
        pool_blocks=pool,
        caching_disabled=False,
        missed=missed(*blocks),
        sibling_common_tokens=sibling,
    )


def disabled_lookup(num_blocks: int, tail: int = 1) -> LookupReport:
    return LookupReport(
        num_prompt_tokens=num_blocks * BLOCK_SIZE + tail,
        block_size=BLOCK_SIZE,
        num_eligible_blocks=num_blocks,
        num_resident_blocks=0,
        live_blocks=0,
        pool_blocks=0,
        caching_disabled=True,
    )


def make_add(name: str, *, num_tokens: int = 9, arrival_s: float = 1000.0, group: str | None = None, **fields: Any) -> AddRequest:
    prompt: Sequence[int] = range(num_tokens)
    return AddRequest(
        request_id=name,
        group_id=group or name,
        prompt_token_ids=list(prompt),
        params=SamplingParams(seed=0),
        arrival_s=arrival_s,
        **fields,
    )


def make_finished(request: AddRequest, now_s: float, status: str = "completed", **fields: Any) -> Finished:
    reason = {"completed": "stop", "aborted": "abort"}.get(status, "error")
    return Finished(request, now_s, status, reason, **fields)  # type: ignore[arg-type]
