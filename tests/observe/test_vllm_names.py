"""`metrics_compat="vllm"`: the same numbers, at the same moment, under the names, types and buckets that others' dashboards read."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from pagedcore.commands.flags import engine_flags
from pagedcore.config import EngineConfig
from pagedcore.core.events import Admitted, Arrived, BlockEvicted, FirstToken, Preempted
from pagedcore.errors import ConfigError
from pagedcore.metrics_compat.ledgers import VllmLedger, ledger_for
from pagedcore.metrics_compat.vllm_names import COUNTERS, GAUGES, HISTOGRAMS, VLLM_FAMILIES
from pagedcore.observe.catalogue import BASE_LABELS, FAMILIES
from pagedcore.observe.exposition import metrics_text
from pagedcore.observe.ledger import Ledger
from support.observed import Engine, block_hash, make_add, make_finished, make_lookup, sample_key, samples_of_registry

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip

EXPECTED = {
    "gauge": {
        "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc", "cache_config_info",
    },
    "counter": {
        "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "prompt_tokens_by_source",
        "prompt_tokens_cached", "generation_tokens", "request_success",
    },
    "histogram": {
        "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total", "time_to_first_token_seconds",
        "inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds",
    },
}  # fmt: skip
"""What dashboards for vLLM read, and autoscalers and gateways."""


def busy_engine() -> Engine:
    """13 + 23 prompt tokens, of which 12 hit; one request waits for a quota, two for blocks; three tokens come out."""
    engine = Engine(ledger=VllmLedger())
    engine.serve("r1", make_lookup("a", "b", "c"), tenant="acme")
    request = make_add("r2", num_tokens=23, arrival_s=1000.0)
    engine.step(Arrived(request, 1000.0), Admitted("r2", 1000.5, make_lookup("x", "y", live=1, pool=2, tail=3)))
    engine.step(FirstToken("r2", 1002.0), Preempted("r2", 1002.0, 23, 1.0, 0.5), step_id=1, num_tokens=23, num_sequences=1)
    engine.step(step_id=2, num_tokens=1, num_sequences=1, inter_token_gaps_s=[0.25, 0.25])
    engine.step(BlockEvicted(block_hash("a"), 1000.0, 3, 20.0, 0.5), reuse_gaps_s=[4.0])
    engine.clock.now_s = 1003.0
    end = make_finished(
        request, 1003.0, num_output_tokens=3, admitted_s=1000.5, first_token_s=1002.0, last_token_s=1002.5, num_computed_prompt_tokens=11
    )
    engine.step(
        end, num_running=2, num_waiting=3, num_swapped=1, waiting_by_reason={"tenant_quota": 1, "blocks": 2},
        num_active_blocks=16, num_free_blocks=48,
    )  # fmt: skip
    return engine


@functools.cache
def busy_samples() -> dict[str, float]:
    return busy_engine().samples()


def test_the_names_and_types_are_those_that_dashboards_read() -> None:
    assert {kind: {f.name for f in VLLM_FAMILIES.values() if f.kind == kind} for kind in EXPECTED} == {
        kind: {f"vllm:{name}_total" if kind == "counter" else f"vllm:{name}" for name in names} for kind, names in EXPECTED.items()
    }


def test_a_scrape_shows_ours_and_theirs_with_their_types_and_labels() -> None:
    families = {f.name: f for f in text_string_to_metric_families(metrics_text(busy_engine().registry)[0].decode())}
    assert len(families) == len(FAMILIES) + len(VLLM_FAMILIES)
    for family in VLLM_FAMILIES.values():
        base = family.name.removesuffix("_total") if family.kind == "counter" else family.name
        assert families[base].type == family.kind
        assert {frozenset(s.labels) - {"le"} for s in families[base].samples} == {frozenset((*BASE_LABELS, *family.labels))}
        assert not [s for s in families[base].samples if s.name.endswith("_created")]


def test_buckets_are_theirs() -> None:
    engine = busy_engine()
    samples = engine.samples()
    prefix = "vllm:time_to_first_token_seconds_bucket{engine=0,le="
    bounds = [key.removeprefix(prefix).partition(",")[0] for key in samples if key.startswith(prefix)]
    assert bounds == [*map(str, TTFT_BUCKETS), "+Inf"]
    assert VLLM_FAMILIES["vllm:request_prompt_tokens"].buckets[:7] == (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
    assert VLLM_FAMILIES["vllm:inter_token_latency_seconds"].buckets[:3] == (0.01, 0.025, 0.05)
    assert VLLM_FAMILIES["vllm:e2e_request_latency_seconds"].buckets[:3] == (0.3, 0.5, 0.8)
    assert VLLM_FAMILIES["vllm:iteration_tokens_total"].buckets[:3] == (1.0, 8.0, 16.0)


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("num_requests_running", {}, 2),
        ("num_requests_waiting", {}, 3),
        ("num_requests_waiting_by_reason", {"reason": "capacity"}, 2),
        ("num_requests_waiting_by_reason", {"reason": "deferred"}, 1),
        ("kv_cache_usage_perc", {}, 16 / 64),
        ("cache_config_info", {"block_size": "4", "num_gpu_blocks": "64", "cache_dtype": "auto"}, 1),
        ("prefix_cache_queries_total", {}, 13 + 23),
        ("prefix_cache_hits_total", {}, 12),
        ("prompt_tokens_cached_total", {}, 12),
        ("prompt_tokens_by_source_total", {"source": "local_cache_hit"}, 12),
        ("prompt_tokens_by_source_total", {"source": "local_compute"}, 13 + 11),
        ("prompt_tokens_by_source_total", {"source": "external_kv_transfer"}, 0),
        ("num_preemptions_total", {}, 1),
        ("prompt_tokens_total", {}, 13 + 23),
        ("generation_tokens_total", {}, 3),
        ("request_success_total", {"finished_reason": "stop"}, 2),
        ("request_success_total", {"finished_reason": "abort"}, 0),
        ("time_to_first_token_seconds_sum", {}, 2.0),
        ("time_to_first_token_seconds_bucket", {"le": "2.5"}, 1),
        ("time_to_first_token_seconds_bucket", {"le": "1.0"}, 0),
        ("inter_token_latency_seconds_sum", {}, 0.5),
        ("inter_token_latency_seconds_count", {}, 2),
        ("request_time_per_output_token_seconds_sum", {}, 0.25),
        ("e2e_request_latency_seconds_sum", {}, 3.0),
        ("e2e_request_latency_seconds_count", {}, 2),
        ("request_queue_time_seconds_sum", {}, 0.5),
        ("request_prefill_time_seconds_sum", {}, 1.5),
        ("request_decode_time_seconds_sum", {}, 0.5),
        ("request_inference_time_seconds_sum", {}, 2.0),
        ("request_prompt_tokens_sum", {}, 23),
        ("request_generation_tokens_sum", {}, 3),
        ("iteration_tokens_total_sum", {}, 24),
        ("kv_block_lifetime_seconds_sum", {}, 20.0),
        ("kv_block_idle_before_evict_seconds_sum", {}, 0.5),
        ("kv_block_reuse_gap_seconds_sum", {}, 4.0),
    ],
)  # fmt: skip
def test_each_number_is_the_one_under_our_name(name: str, labels: dict[str, str], value: float) -> None:
    assert busy_samples()[sample_key(f"vllm:{name}", {"model_name": "m", "engine": "0", **labels})] == value


def test_every_name_of_theirs_gets_its_numbers_from_somewhere() -> None:
    derived = {other for aliases in (*COUNTERS.values(), *GAUGES.values()) for other, _ in aliases} | set(HISTOGRAMS.values())
    ours = {*COUNTERS, *GAUGES, *HISTOGRAMS}
    made_by_the_ledger = {"num_requests_waiting", "num_requests_waiting_by_reason"}
    made_at_the_end = {
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
        "request_prompt_tokens", "request_generation_tokens",
    }  # fmt: skip
    assert derived | {f"vllm:{name}" for name in made_by_the_ledger | made_at_the_end} == set(VLLM_FAMILIES)
    assert ours <= set(FAMILIES)


@pytest.mark.parametrize(("status", "reason"), [("completed", "stop"), ("aborted", "abort"), ("error", "error"), ("rejected", None)])
def test_endings_have_their_words(status: str, reason: str | None) -> None:
    engine = Engine(ledger=VllmLedger())
    request = make_add("r")
    engine.step(Arrived(request, 1000.0), make_finished(request, 1000.0, status))
    counted = {key: value for key, value in engine.samples().items() if key.startswith("vllm:request_success_total") and value}
    assert [key.partition("finished_reason=")[2].partition(",")[0] for key in counted] == ([] if reason is None else [reason])


def test_engines_with_and_without_the_other_names_share_a_registry() -> None:
    registry = CollectorRegistry()
    plain, both = Engine(registry=registry, engine="a"), Engine(registry=registry, engine="b", ledger=VllmLedger())
    for engine in (plain, both, Engine(registry=registry, engine="c", ledger=VllmLedger())):
        engine.serve("r1", make_lookup("a", live=1))
    theirs = [key for key in plain.samples() if key.startswith("vllm:prefix_cache_hits_total")]
    assert theirs == ["vllm:prefix_cache_hits_total{engine=b,model_name=m}", "vllm:prefix_cache_hits_total{engine=c,model_name=m}"]


def test_the_setting_chooses_the_ledger_and_nothing_else_is_taken() -> None:
    assert type(ledger_for(EngineConfig().metrics_compat)) is Ledger
    assert type(ledger_for(EngineConfig(metrics_compat="vllm").metrics_compat)) is VllmLedger
    with pytest.raises(ConfigError, match="metrics_compat is 'sglang' and must be one of None, vllm"):
        EngineConfig(metrics_compat="sglang")  # type: ignore[arg-type]


@pytest.mark.parametrize("escaping", ["", ";escaping=allow-utf-8", ";escaping=underscores"])
def test_scrapers_of_openmetrics_read_both(escaping: str) -> None:
    registry = busy_engine().registry
    text, content_type = metrics_text(registry, f"application/openmetrics-text;version=1.0.0{escaping}")
    assert content_type.startswith("application/openmetrics-text")
    shown = {sample.name for family in openmetrics_families(text.decode()) for sample in family.samples}
    assert shown == {
        sample.name for family in text_string_to_metric_families(metrics_text(registry)[0].decode()) for sample in family.samples
    }


def test_the_command_line_has_the_setting() -> None:
    (flag,) = [flag for flag in engine_flags() if flag.field == "metrics_compat"]
    assert (flag.name, flag.metavar, flag.default) == ("--metrics-compat", "vllm", None)


MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.needs_torch
def test_a_whole_engine_shows_them_when_asked(tmp_path: Path) -> None:
    from pagedcore import LLM, SamplingParams

    (tmp_path / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "num_kv_blocks": 32, "device": "cpu", "metrics_instance": "compat"}
    with LLM(str(tmp_path), metrics_compat="vllm", **options) as llm:
        for _ in range(2):
            llm.generate([list(range(33))], SamplingParams(max_tokens=2, ignore_eos=True))
        samples = samples_of_registry(REGISTRY)
    theirs = {
        key.partition("{")[0]: value for key, value in samples.items() if key.startswith("vllm:prefix_cache") and "engine=compat" in key
    }
    assert theirs == {"vllm:prefix_cache_queries_total": 66, "vllm:prefix_cache_hits_total": 32}


WRITER = """
from prometheus_client import REGISTRY
from pagedcore.metrics_compat.ledgers import VllmLedger
from support.observed import Engine, make_lookup
engine = Engine(registry=REGISTRY, ledger=VllmLedger())
engine.serve("r1", make_lookup("a", live=1, tail=0))
engine.step(num_running=0)
"""
READER = "import sys; from pagedcore.observe.exposition import metrics_text; sys.stdout.buffer.write(metrics_text()[0])"


def test_another_process_is_scraped_with_both_names(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    shown = ""
    for code in (WRITER, READER):
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240, check=True)
        shown = done.stdout
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 4.0' in shown
    assert 'pagedcore_prefix_cache_hit_tokens_total{engine="0",model_name="m",source="live",tenant=""} 4.0' in shown
