"""What stands out beside the five indicators: a symptom, its cause and the setting to change, in one sentence each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedcore.console.indicators import Targets
from pagedcore.readable import duration

STALL_FACTOR = 4.0
"""A wait for a token is a stall from this many times the usual one on."""

MIN_STEP_TOKENS = 32
"""No smaller max_num_batched_tokens is proposed."""

FLOOD_SHARE = 2 / 3
"""Of the open requests: a tenant who has more of them, while others wait, floods."""


def findings(stats: Mapping[str, Any], targets: Targets) -> list[str]:
    """Sentences about one engine, from its answer to "stats"; none where nothing stands out."""
    return [*_stall(stats, targets), *_flood(stats)]


def _stall(stats: Mapping[str, Any], targets: Targets) -> list[str]:
    """A step takes the usual time, and more for each prompt token in it."""
    minute, limit = stats["last_minute"], stats["max_num_batched_tokens"]
    usual_s, longest_s, num_prefill_tokens = (
        minute[name] for name in ("token_gap_p50_s", "token_gap_max_s", "token_gap_max_step_prefill_tokens")
    )
    if not num_prefill_tokens or longest_s < max(targets.token_gap_s, STALL_FACTOR * usual_s):
        return []
    s_per_token = (longest_s - usual_s) / num_prefill_tokens
    advised = _power_of_two_below((targets.token_gap_s - usual_s) / s_per_token)
    hint = f": {advised:,} would keep such a wait near {duration(usual_s + advised * s_per_token)}" if advised < limit else ""
    sentence = (
        f"Answers stood still for up to {duration(longest_s)} (a token mostly takes {duration(usual_s)}) while one step computed "
        f"{num_prefill_tokens:,} prompt tokens. Lower max_num_batched_tokens, now {limit:,}{hint}."
    )
    return [sentence]


def _power_of_two_below(value: float) -> int:
    return 1 << max(int(value), MIN_STEP_TOKENS).bit_length() - 1


def _flood(stats: Mapping[str, Any]) -> list[str]:
    rows = stats["tenants"]
    others = rows[1:]
    if not any(row["num_waiting"] for row in others):
        return []
    flooding, num_open = rows[0], sum(_num_open(row) for row in rows)
    if _num_open(flooding) <= FLOOD_SHARE * num_open or _goes_last(flooding, others, stats["scheduling_policy"]):
        return []
    name = f"Tenant {flooding['tenant']}" if flooding["tenant"] else "Callers without a tenant"
    verb = "has" if flooding["tenant"] else "have"
    sentence = (
        f"{name} {verb} {_num_open(flooding):,} of {num_open:,} open requests, and others wait behind them. "
        "Set scheduling_policy=priority and give those requests a higher priority number: then the others go first. "
        "max_running_per_tenant bounds the rows of each tenant, max_waiting_per_tenant its part of the queue."
    )
    return [sentence]


def _goes_last(flooding: Mapping[str, Any], others: list[Mapping[str, Any]], policy: str) -> bool:
    waiting = [row["priority"] for row in others if row["num_waiting"]]
    return policy == "priority" and flooding["priority"] > max(waiting)


def _num_open(row: Mapping[str, Any]) -> int:
    return int(row["num_waiting"] + row["num_running"])
