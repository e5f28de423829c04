"""Builders for what an operator's console reads: an engine's answer to "stats" by hand."""

from __future__ import annotations

from typing import Any

from pagedcore.console.inspector import Answer


def make_stats(
    *, busy: float = 0.8, hit_rate: float | None = 0.9, ideal: float | None = 0.95, ttft_s: float | None = 0.4, **facts: Any
) -> Answer:
    """A healthy engine, but for what is given."""
    rates = {"page": hit_rate, "prefix": hit_rate, "pool": hit_rate, "ideal": ideal}
    minute = {
        "seconds": 60.0, "step_busy_ratio": busy, "generated_tokens_per_s": 10.0, "prefill_tokens_per_s": 50.0, "num_ended": 3,
        "num_first_tokens": 20, "ttft_p50_s": ttft_s, "ttft_p99_s": ttft_s, "hit_rate": rates,
        "token_gap_p50_s": 0.02, "token_gap_max_s": 0.03, "token_gap_max_step_tokens": 4, "token_gap_max_step_prefill_tokens": 0,
    }  # fmt: skip
    defaults = {
        "engine": "0", "model": "fake", "max_num_seqs": 8, "max_num_batched_tokens": 2048, "scheduling_policy": "fcfs",
        "enable_prefix_caching": True, "num_running": 4, "num_waiting": 0, "num_waiting_by_reason": {}, "tenants": [],
    }  # fmt: skip
    return {**defaults, "hit_rate": rates, "last_minute": minute, **facts}
