"""What a scrape of one process shows."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pagedcore.http.metrics_server import start_metrics_server
from pagedcore.observe.catalogue import BASE_LABELS, FAMILIES
from pagedcore.observe.exposition import metrics_text
from pagedcore.observe.ledger import Key
from pagedcore.observe.prometheus import EngineSink
from pagedcore.observe.recorder import FLUSH_INTERVAL_S, MAX_FAILED_WRITES
from support.observed import Engine, FakeClock, make_add, make_lookup, sample_key, samples_of

HALF = make_lookup("a", live=1, tail=0)  # 8 tokens, 4 served


def test_the_whole_catalogue_is_visible_after_one_request() -> None:
    engine = Engine()
    engine.serve("r1", make_lookup("a"))
    families = {f.name: f for f in text_string_to_metric_families(metrics_text(engine.registry)[0].decode())}
    for family in FAMILIES.values():
        shown = families[family.name.removesuffix("_total")]
        assert shown.type == family.kind
        assert shown.documentation == family.help
        labels = {frozenset(s.labels) - {"le"} for s in shown.samples}
        assert labels == ({frozenset((*BASE_LABELS, *family.labels))} if family.name != "pagedcore_device_utilization_ratio" else set())
    assert set(families) == {name.removesuffix("_total") for name in FAMILIES}


def test_every_child_of_the_catalogue_is_there_before_anything_happens() -> None:
    engine = Engine()
    samples = engine.samples()
    for family in FAMILIES.values():
        suffix = "_count" if family.kind == "histogram" else ""
        for values in family.children:
            labels = dict(zip(family.labels, values, strict=True))
            key = sample_key(family.name + suffix, {"model_name": "m", "engine": "0", **labels})
            assert samples[key] == 0 or "hit_rate" in key


def test_no_family_comes_twice_and_none_shadows_another() -> None:
    engine = Engine()
    text = metrics_text(engine.registry)[0].decode()
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) == len(FAMILIES)
    samples_of(text)  # raises where a sample comes twice
    bases = [name.removesuffix("_total") for name in FAMILIES]
    assert len(bases) == len(set(bases))


def test_a_scrape_right_after_a_request_is_exact() -> None:
    engine = Engine()
    for number in range(1, 6):
        engine.serve(f"r{number}", HALF)
        assert engine.value("pagedcore_prefix_cache_hit_tokens_total", source="live", tenant="") == 4 * number


def test_a_script_that_greps_cache_hit_rate_prints_the_prefix_hit_rate() -> None:
    engine = Engine()
    engine.serve("r1", HALF)
    engine.step(num_fresh_acquisitions=9)
    lines = [line for line in metrics_text(engine.registry)[0].decode().splitlines() if "cache_hit_rate" in line]
    assert float(lines[-1].split()[-1]) == 0.5
    assert [line for line in lines if not line.startswith("#")] == ['pagedcore_cache_hit_rate{engine="0",model_name="m"} 0.5']
    assert not [name for name, family in FAMILIES.items() if "cache_hit_rate" in name + family.help and name != "pagedcore_cache_hit_rate"]


def test_two_engines_of_one_process_have_their_own_series() -> None:
    registry, clock = CollectorRegistry(), FakeClock()
    one, two = (Engine(registry=registry, clock=clock, engine=name) for name in ("a", "b"))
    one.serve("r1", HALF)
    two.serve("r1", make_lookup("x"))
    assert one.value("pagedcore_cache_hit_rate") == 0.5
    assert two.value("pagedcore_cache_hit_rate") == 0.0
    assert (one.recorder.engine, two.recorder.engine) == ("a", "b")


def test_live_engines_of_one_name_do_not_write_to_the_same_series() -> None:
    registry = CollectorRegistry()
    one, two, other = Engine(registry=registry), Engine(registry=registry), Engine(registry=registry, model_name="other")
    assert (one.recorder.engine, two.recorder.engine, other.recorder.engine) == ("0", "0-2", "0")
    two.serve("r1", HALF)
    assert one.value("pagedcore_page_lookups_total") == 0
    assert two.value("pagedcore_page_lookups_total") == 2


def test_an_engine_made_again_goes_on_with_its_counters_and_begins_its_own_rates() -> None:
    registry = CollectorRegistry()
    first = Engine(registry=registry, device_memory_bytes={"weights": 9})
    first.serve("r1", HALF)
    first.step(num_running=3, num_active_blocks=5)
    first.recorder.close()
    first.recorder.close()
    assert first.value("pagedcore_open_requests", state="running") == 0
    assert first.value("pagedcore_blocks", state="active") == 0
    assert first.value("pagedcore_device_memory_bytes", kind="total") == 0
    second = Engine(registry=registry)
    assert second.recorder.engine == "0"
    second.serve("r1", make_lookup("x"))
    second.recorder.flush()
    first.clock.now_s += 100.0  # its window is empty now, and nobody must see that
    first.recorder.flush()
    assert second.value("pagedcore_cache_level_hit_rate", level="page", window="1m") == 0.0
    assert second.value("pagedcore_page_lookups_total") == 2 + 1
    assert second.value("pagedcore_cache_hit_rate") == 0.0
    assert second.recorder.stats().page_lookups == 1


def test_a_host_that_reads_the_registry_itself_sees_an_idle_engine_exactly() -> None:
    engine = Engine()
    engine.step(num_running=0)
    engine.serve("r1", HALF)
    engine.step(num_running=0)
    assert 'pagedcore_page_lookups_total{engine="0",model_name="m"} 2.0' in generate_latest(engine.registry).decode()


def test_a_busy_engine_exports_once_an_interval_at_most() -> None:
    engine = Engine()

    def exported() -> float | None:
        return engine.registry.get_sample_value("pagedcore_step_tokens_count", {"model_name": "m", "engine": "0"})

    start_s = engine.clock.now_s
    engine.step(step_id=1)
    assert exported() == 0
    engine.clock.now_s = start_s + FLUSH_INTERVAL_S / 2
    engine.step(step_id=2)
    engine.recorder.maybe_flush(engine.clock.now_s)
    assert exported() == 0
    engine.clock.now_s = start_s + 2 * FLUSH_INTERVAL_S
    engine.recorder.maybe_flush(engine.clock.now_s)
    assert exported() == 2
    engine.clock.now_s = start_s + 4 * FLUSH_INTERVAL_S
    engine.step(step_id=3)
    assert exported() == 3


def test_creation_times_are_left_out_for_our_families_only() -> None:
    registry = CollectorRegistry()
    Counter("host_things", "The host's own.", registry=registry)
    Engine(registry=registry).serve("r1", HALF)
    text = metrics_text(registry)[0].decode()
    assert "host_things_created" in text
    assert "pagedcore" not in "".join(line for line in text.splitlines() if "_created" in line)


def test_a_host_that_took_one_of_our_names_costs_the_export_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    Counter("pagedcore_page_lookups", "Taken.", registry=registry)
    engine = Engine(registry=registry)
    engine.serve("r1", HALF)
    assert engine.recorder.export_fault is not None
    assert "pagedcore_page_lookups" in engine.recorder.export_fault
    assert "counted but not exported" in caplog.text
    assert engine.recorder.stats().page_lookups == 2


@pytest.mark.parametrize("fault", [OSError("disk full"), ValueError("I/O operation on a closed file")], ids=repr)
def test_a_registry_that_cannot_be_written_costs_the_export_and_nothing_else(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise fault

    engine = Engine()
    engine.serve("r1", HALF)
    monkeypatch.setattr(EngineSink, "add", fail)
    engine.serve("r2", HALF)
    engine.recorder.received(make_add("r3"))
    engine.recorder.flush()
    assert type(fault).__name__ in (engine.recorder.export_fault or "")
    assert caplog.text.count("counted but not exported") == 1
    assert engine.recorder.stats().page_lookups == 4


@pytest.mark.parametrize(
    "fault", [RuntimeError("dictionary changed size during iteration"), KeyError("a registry of the host's")], ids=repr
)
@pytest.mark.parametrize("method", ["add", "set", "observe"])
def test_any_other_fault_of_a_registry_costs_a_write_and_the_next_export_brings_all_that_was_counted(
    method: str, fault: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise fault

    engine = Engine()
    engine.serve("r1", HALF)
    with monkeypatch.context() as patch:
        patch.setattr(EngineSink, method, fail)
        engine.serve("r2", HALF)
        engine.step(step_id=1, num_running=0, num_tokens=2)
        engine.recorder.flush()
    engine.step(num_running=2)
    assert engine.recorder.export_fault is None
    assert (
        engine.value("pagedcore_requests_total", status="completed", finish_reason="stop", adapter="library", tenant="", **{"class": ""})
        == 2
    )
    assert engine.value("pagedcore_page_lookups_total") == 4
    assert engine.value("pagedcore_open_requests", state="running") == 2
    assert caplog.text.count(type(fault).__name__ + ":") == 1, "said once"


def test_a_fault_that_goes_on_stops_the_export_and_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Such as a damaged file: each write fails, and hides all others behind it."""

    def fail(*_: object) -> None:
        raise RuntimeError("Read beyond file size detected, file is corrupted.")

    engine = Engine()
    monkeypatch.setattr(EngineSink, "set", fail)
    for number in range(MAX_FAILED_WRITES + 2):
        engine.step(step_id=number, num_running=1)
        engine.recorder.flush()
    assert engine.recorder.export_fault == "RuntimeError: Read beyond file size detected, file is corrupted."
    assert caplog.text.count("counted but not exported") == 1


def test_observations_of_which_some_could_be_written_are_not_written_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    observe, engine, name = EngineSink.observe, Engine(), "pagedcore_inter_token_latency_seconds"

    def fail_behind(sink: EngineSink, key: Key, *arguments: Any) -> None:
        observe(sink, key, *arguments)
        if key == (name,):
            raise RuntimeError("it was written")

    with monkeypatch.context() as patch:
        patch.setattr(EngineSink, "observe", fail_behind)
        engine.step(step_id=1, num_running=0, inter_token_gaps_s=[0.01])
        engine.recorder.flush()
    engine.step(step_id=2, inter_token_gaps_s=[0.01])
    assert engine.value(f"{name}_count") == 2


def test_the_metrics_server_serves_the_same_text_on_a_free_port() -> None:
    engine = Engine()
    engine.serve("r1", HALF)
    server = start_metrics_server(0, registry=engine.registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as reply:
            assert reply.read() == metrics_text(engine.registry)[0]
            assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    finally:
        server.close()


def test_an_engine_that_was_dropped_without_close_gives_its_name_back() -> None:
    registry = CollectorRegistry()
    Engine(registry=registry)
    assert Engine(registry=registry).recorder.engine == "0"
