"""Exemplars: a latency that belongs to a caller's trace names it, where a scraper can read that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from pagedcore.observe.exposition import CONTENT_TYPE, metrics_text
from support.traced import TRACE_ID, TRACEPARENT, TracedEngine, live_through_a_preemption, preempted_request

ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
"""As Prometheus sends it."""


def exemplars_of(engine: TracedEngine) -> dict[tuple[str, str], tuple[str, float]]:
    """(family, le) -> (trace id, value), of an OpenMetrics scrape."""
    text, content_type = metrics_text(engine.registry, ACCEPT)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    return {
        (family.name, sample.labels["le"]): (sample.exemplar.labels["trace_id"], sample.exemplar.value)
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.exemplar is not None
    }


def test_the_latencies_of_a_traced_request_name_its_trace() -> None:
    engine = TracedEngine()
    live_through_a_preemption(engine, preempted_request(traceparent=TRACEPARENT))
    found = exemplars_of(engine)
    assert {key: trace_id for key, (trace_id, _) in found.items()} == {
        ("pagedcore_time_in_queue_seconds", "2.5"): TRACE_ID,
        ("pagedcore_time_to_first_token_seconds", "2.5"): TRACE_ID,
        ("pagedcore_request_latency_seconds", "5.0"): TRACE_ID,
    }
    assert [value for _, value in found.values()] == pytest.approx([1.4, 1.5, 2.6])


def test_a_request_without_a_trace_has_none() -> None:
    engine = TracedEngine()
    live_through_a_preemption(engine, preempted_request())
    assert exemplars_of(engine) == {}


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain;version=0.0.4"])
def test_who_does_not_ask_for_openmetrics_gets_the_text_that_everybody_reads(accept: str) -> None:
    engine = TracedEngine()
    live_through_a_preemption(engine, preempted_request(traceparent=TRACEPARENT))
    text, content_type = metrics_text(engine.registry, accept)
    assert content_type == CONTENT_TYPE
    assert TRACE_ID.encode() not in text


WRITER = """
from prometheus_client import REGISTRY
from support.traced import TRACEPARENT, TracedEngine, live_through_a_preemption, preempted_request
engine = TracedEngine(registry=REGISTRY)
live_through_a_preemption(engine, preempted_request(traceparent=TRACEPARENT))
assert engine.recorder.export_fault is None
from pagedcore.observe.exposition import metrics_text
text, content_type = metrics_text(REGISTRY, "application/openmetrics-text;version=1.0.0")
print(content_type)
print([line for line in text.decode().splitlines() if "pagedcore_time_to_first_token_seconds_count" in line or "# {" in line])
"""


def test_a_process_of_a_multi_process_set_up_has_its_latencies_and_no_exemplars(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    done = subprocess.run([sys.executable, "-W", "error", "-c", WRITER], env=env, capture_output=True, text=True, timeout=240, check=True)
    content_type, lines = done.stdout.splitlines()
    assert content_type == CONTENT_TYPE
    assert lines == """['pagedcore_time_to_first_token_seconds_count{engine="0",model_name="m"} 1.0']"""


def test_both_texts_hold_the_same_samples() -> None:
    engine = TracedEngine()
    live_through_a_preemption(engine, preempted_request(traceparent=TRACEPARENT))
    plain, open_text = (metrics_text(engine.registry, accept)[0].decode() for accept in ("", ACCEPT))

    def samples(text: str) -> set[str]:
        return {line.split(" # ")[0] for line in text.splitlines() if not line.startswith("#")}

    assert samples(plain) == samples(open_text)
