"""vLLM's metric names, types and buckets, and which of our numbers stands under each.

Gauges that are sums of ours (the waiting requests) are made by `VllmLedger`. Tokens from every source count as hits, those of host
memory as external_kv_transfer. What has no meaning here is not there: LoRA, sleep and multi-modal caches.
"""

from __future__ import annotations

from collections.abc import Callable

from pagedcore.observe.catalogue import INFO_LABELS, Family, Kind

_QUICK = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
_WHOLE = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_RESIDENCY = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0,
)  # fmt: skip
_STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_LENGTHS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

FINISHED_REASONS = ("stop", "length", "abort", "error")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")

Relabel = Callable[..., tuple[str, ...] | None]
"""Our label values, in the order of their family -> those of the other name; None: it does not count there."""


def _whole(*_: str) -> tuple[str, ...]:
    return ()


def _running(state: str) -> tuple[str, ...] | None:
    return () if state == "running" else None


def _finished_reason(status: str, finish_reason: str, *_: str) -> tuple[str, ...] | None:
    reason = {"completed": finish_reason, "aborted": "abort", "error": "error"}.get(status)
    return None if reason is None else (reason,)


def _hit_source(source: str, *_: str) -> tuple[str, ...]:
    return ("external_kv_transfer",) if source == "host" else ("local_cache_hit",)


def _computed(*_: str) -> tuple[str, ...]:
    return ("local_compute",)


def _cache_config(*values: str) -> tuple[str, ...]:
    facts = dict(zip(INFO_LABELS, values, strict=True))
    return facts["block_size"], facts["num_blocks"], facts["kv_cache_dtype"]


COUNTERS: dict[str, tuple[tuple[str, Relabel], ...]] = {
    "pagedcore_prefix_cache_queries_tokens_total": (("vllm:prefix_cache_queries_total", _whole),),
    "pagedcore_prefix_cache_hit_tokens_total": (
        ("vllm:prefix_cache_hits_total", _whole),
        ("vllm:prompt_tokens_cached_total", _whole),
        ("vllm:prompt_tokens_by_source_total", _hit_source),
    ),
    "pagedcore_computed_prompt_tokens_total": (("vllm:prompt_tokens_by_source_total", _computed),),
    "pagedcore_preemptions_total": (("vllm:num_preemptions_total", _whole),),
    "pagedcore_prompt_tokens_total": (("vllm:prompt_tokens_total", _whole),),
    "pagedcore_generation_tokens_total": (("vllm:generation_tokens_total", _whole),),
    "pagedcore_requests_total": (("vllm:request_success_total", _finished_reason),),
}

GAUGES: dict[str, tuple[tuple[str, Relabel], ...]] = {
    "pagedcore_open_requests": (("vllm:num_requests_running", _running),),
    "pagedcore_kv_cache_usage_ratio": (("vllm:kv_cache_usage_perc", _whole),),
    "pagedcore_engine_info": (("vllm:cache_config_info", _cache_config),),
}

HISTOGRAMS = {
    "pagedcore_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "pagedcore_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "pagedcore_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "pagedcore_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "pagedcore_time_in_queue_seconds": "vllm:request_queue_time_seconds",
    "pagedcore_step_tokens": "vllm:iteration_tokens_total",
    "pagedcore_block_lifetime_seconds": "vllm:kv_block_lifetime_seconds",
    "pagedcore_block_idle_seconds": "vllm:kv_block_idle_before_evict_seconds",
    "pagedcore_block_reuse_gap_seconds": "vllm:kv_block_reuse_gap_seconds",
}

WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"


def _family(name: str, kind: Kind, text: str, labels: tuple[str, ...] = (), values: tuple[str, ...] = ()) -> Family:
    return Family("vllm:" + name, kind, text, labels, tuple((value,) for value in values) if values else ((),))


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Family:
    return Family("vllm:" + name, "histogram", text, buckets=buckets)


_FAMILIES = (
    _family("num_requests_running", "gauge", "Requests in the batch."),
    _family("num_requests_waiting", "gauge", "Requests that wait."),
    _family("num_requests_waiting_by_reason", "gauge", "deferred: for the quota of a tenant; capacity: for anything else.",
            ("reason",), ("capacity", "deferred")),
    _family("kv_cache_usage_perc", "gauge", "Active blocks over all blocks, from 0 to 1."),
    Family("vllm:cache_config_info", "gauge", "1; the labels say it.", ("block_size", "num_gpu_blocks", "cache_dtype"), children=()),
    _family("prefix_cache_queries_total", "counter", "Prompt tokens looked up."),
    _family("prefix_cache_hits_total", "counter", "Prompt tokens served by the prefix cache."),
    _family("prompt_tokens_cached_total", "counter", "Prompt tokens served by the prefix cache."),
    _family("prompt_tokens_by_source_total", "counter", "Prompt tokens, by where they came from.", ("source",), PROMPT_SOURCES),
    _family("num_preemptions_total", "counter", "Requests that gave their blocks back to be computed again."),
    _family("prompt_tokens_total", "counter", "Prompt tokens of admitted requests."),
    _family("generation_tokens_total", "counter", "Output tokens of ended requests."),
    _family("request_success_total", "counter", "Ended requests, but for rejected ones.", ("finished_reason",), FINISHED_REASONS),
    _histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST),
    _histogram("inter_token_latency_seconds", "Between two tokens of one output.", _QUICK),
    _histogram("request_time_per_output_token_seconds", "(last - first token) / (tokens - 1), one an output.", _QUICK),
    _histogram("e2e_request_latency_seconds", "Arrival to end.", _WHOLE),
    _histogram("request_queue_time_seconds", "Arrival to first admission.", _WHOLE),
    _histogram("request_prefill_time_seconds", "First admission to first token, one an output.", _WHOLE),
    _histogram("request_decode_time_seconds", "First to last token, one an output.", _WHOLE),
    _histogram("request_inference_time_seconds", "First admission to last token, one an output.", _WHOLE),
    _histogram("request_prompt_tokens", "Prompt tokens, one an output.", _LENGTHS),
    _histogram("request_generation_tokens", "Output tokens, one an output.", _LENGTHS),
    _histogram("iteration_tokens_total", "Tokens of one step.", _STEP_TOKENS),
    _histogram("kv_block_lifetime_seconds", "From the filling of a block to its eviction.", _RESIDENCY),
    _histogram("kv_block_idle_before_evict_seconds", "From the last use of a block to its eviction.", _RESIDENCY),
    _histogram("kv_block_reuse_gap_seconds", "Between two acquisitions of a cached block.", _RESIDENCY),
)  # fmt: skip

VLLM_FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}
