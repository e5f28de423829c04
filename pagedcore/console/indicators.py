"""The five numbers that people watch, each with its target, a verdict and the next step to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pagedcore.errors import ConfigError

Verdict = Literal["good", "attention", "idle"]
"""`idle`: nothing happened in the last minute that could be judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the indicators are judged by. Raises `ConfigError` naming value and limit."""

    device_busy: float = 0.70
    """Least share of the last minute in which steps ran, while there is traffic."""
    running_share: float = 1.0
    """Share of max_num_seqs that may run: at it, while requests wait, the batch is full."""
    hit_rate: float = 0.85
    """Least share of prompt tokens out of the cache, or that share of what an unbounded cache would give."""
    ttft_p99_s: float = 1.0
    """Most seconds to the first token, of 99 in 100 requests of the last minute."""
    blocked: int = 0
    """Most requests that may wait."""

    def __post_init__(self) -> None:
        for name in ("device_busy", "running_share", "hit_rate"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"The target {name} is {getattr(self, name)!r} and must be between 0 and 1.")
        for name in ("ttft_p99_s", "blocked"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"The target {name} is {getattr(self, name)!r} and must not be negative.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Indicator:
    """One of the five. `note` says what the value was taken from, or what stands beside it."""

    name: str
    value: float | None
    shown: str
    """The value as people read it."""
    target: str
    verdict: Verdict
    note: str
    next_step: str
    """Empty when nothing is to be done."""


def indicators(stats: Mapping[str, Any], targets: Targets) -> list[Indicator]:
    """The five of one engine, from its answer to "stats"."""
    return [
        _device_busy(stats, targets),
        _running(stats, targets),
        _hit_rate(stats, targets),
        _ttft(stats, targets),
        _blocked(stats, targets),
    ]


def indicators_as_json(stats: Mapping[str, Any], targets: Targets) -> list[dict[str, Any]]:
    """The same as JSON objects."""
    return [dataclasses.asdict(indicator) for indicator in indicators(stats, targets)]


def _device_busy(stats: Mapping[str, Any], targets: Targets) -> Indicator:
    minute, is_waiting = stats["last_minute"], stats["num_waiting"] > 0
    value: float = minute["step_busy_ratio"]
    next_step = (
        "Requests wait while the device idles: look at max_batch_wait_ms, at slow clients and at the CPU of this process."
        if is_waiting
        else "The device has room: send more requests here at once, or run fewer replicas."
    )
    verdict: Verdict = "idle" if value == 0.0 else _judge(value >= targets.device_busy)
    return Indicator(
        name="device busy",
        value=value,
        shown=f"{percent(value)}",
        target=f"≥ {percent(targets.device_busy)}",
        verdict=verdict,
        note=f"step time over wall time, last {minute['seconds']:.0f} s",
        next_step=next_step if verdict == "attention" else "",
    )


def _running(stats: Mapping[str, Any], targets: Targets) -> Indicator:
    running, limit, waiting = stats["num_running"], stats["max_num_seqs"], stats["num_waiting"]
    is_full = running >= targets.running_share * limit and waiting > 0
    return Indicator(
        name="running requests",
        value=running,
        shown=f"{running}",
        target=f"< {targets.running_share * limit:g} while any wait",
        verdict="attention" if is_full else ("good" if running else "idle"),
        note=f"max_num_seqs is {limit}",
        next_step="The batch is full: raise max_num_seqs if blocks are free, or add a replica." if is_full else "",
    )


def _hit_rate(stats: Mapping[str, Any], targets: Targets) -> Indicator:
    rates = stats["last_minute"]["hit_rate"]
    value, ideal = rates["prefix"], rates["ideal"]
    target = f"≥ {percent(targets.hit_rate)}, or of the ideal"
    if value is None:
        return _unknown("cache hit rate", target, "no prompt was looked up in the last minute")
    is_good = value >= targets.hit_rate or value >= targets.hit_rate * ideal
    return Indicator(
        name="cache hit rate",
        value=value,
        shown=f"{percent(value)}",
        target=target,
        verdict=_judge(is_good),
        note=f"of an ideal {percent(ideal)}, last minute",
        next_step="" if is_good else "Much that was computed is computed again: read the advice; a larger pool keeps more.",
    )


def _ttft(stats: Mapping[str, Any], targets: Targets) -> Indicator:
    minute = stats["last_minute"]
    value, target = minute["ttft_p99_s"], f"< {targets.ttft_p99_s:g} s"
    if value is None:
        return _unknown("p99 to first token", target, "no first token in the last minute")
    is_good = value < targets.ttft_p99_s
    waits = stats["num_waiting"] > 0
    next_step = (
        "Requests queue before they run: see blocked, and add a replica."
        if waits
        else "Prompts take long to compute: raise the hit rate, or lower max_num_batched_tokens where long prompts hold up short ones."
    )
    return Indicator(
        name="p99 to first token",
        value=value,
        shown=duration(value),
        target=target,
        verdict=_judge(is_good),
        note=f"{minute['num_first_tokens']} first tokens, last minute",
        next_step="" if is_good else next_step,
    )


_REMEDIES = {
    "blocks": "The pool is full: more KV memory (gpu_memory_utilization, num_kv_blocks), or a smaller max_model_len.",
    "max_num_seqs": "The batch is full: raise max_num_seqs.",
    "token_budget": "A step's budget is spent: raise max_num_batched_tokens.",
    "tenant_quota": "A tenant is at its quota: raise it, or let that tenant wait.",
    "priority": "Requests of a higher priority go first: add a replica if the others must not wait.",
}


def _blocked(stats: Mapping[str, Any], targets: Targets) -> Indicator:
    waiting: int = stats["num_waiting"]
    reasons = {reason: count for reason, count in stats["num_waiting_by_reason"].items() if count}
    is_good = waiting <= targets.blocked
    main = max(reasons, key=reasons.__getitem__, default="")
    return Indicator(
        name="blocked",
        value=waiting,
        shown=f"{waiting}",
        target=f"≤ {targets.blocked}",
        verdict=_judge(is_good),
        note=", ".join(f"{count} for {reason}" for reason, count in reasons.items()) or "requests that wait now",
        next_step="" if is_good else _REMEDIES.get(main, "They have just arrived; look again."),
    )


def _judge(is_good: bool) -> Verdict:
    return "good" if is_good else "attention"


def _unknown(name: str, target: str, note: str) -> Indicator:
    return Indicator(name=name, value=None, shown="-", target=target, verdict="idle", note=note, next_step="")


def percent(share: float) -> str:
    """A share as people read it."""
    return f"{share * 100:.0f} %"


def duration(seconds: float) -> str:
    """Seconds as people read them: 12 ms, 1.4 s."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
