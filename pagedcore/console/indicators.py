"""The five numbers that people watch, each with its target, a verdict and the next step to take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pagedcore.errors import ConfigError
from pagedcore.readable import duration, percent
from pagedcore.shown import shown

LEAST_IDEAL = 0.3
"""Below this ideal hit rate no cache helps much, and the layout of the prompts is worth a look."""

MIN_PROMPTS = 16
"""Of fewer prompts in the last minute it is not said that they share little."""

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
    token_gap_s: float = 0.5
    """Most seconds that a running request may wait for its next token before it is said what held it up."""

    def __post_init__(self) -> None:
        for name in ("device_busy", "running_share", "hit_rate"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"The target {name} is {getattr(self, name)!r} and must be between 0 and 1.")
        for name in ("ttft_p99_s", "blocked", "token_gap_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"The target {name} is {getattr(self, name)!r} and must not be negative.")


def parse_targets(pairs: Iterable[str]) -> Targets:
    """Targets out of NAME=VALUE texts, the others as they are. Raises `ConfigError` for what is none."""
    known: dict[str, int | float] = dataclasses.asdict(Targets())
    given: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in known:
            raise ConfigError(f"A target has the form NAME=VALUE; got {shown(pair)}. The names are: {', '.join(known)}.")
        try:
            given[name] = type(known[name])(value)
        except ValueError as error:
            raise ConfigError(f"The target {name} is {shown(value)} and must be a number, such as {known[name]}.") from error
    return Targets(**given)


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
        "Requests wait while the device idles: look at max_batch_wait_ms and at the CPU of this process."
        if is_waiting
        else "The device has room: send more requests here at once, or run fewer replicas."
    )
    is_idle = value == 0.0 or not (is_waiting or stats["num_running"])
    verdict: Verdict = "idle" if is_idle and value < targets.device_busy else _judge(value >= targets.device_busy)
    return Indicator(
        name="device busy",
        value=value,
        shown=_beside(value, targets.device_busy),
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
    minute = stats["last_minute"]
    rates, target = minute["hit_rate"], f"≥ {percent(targets.hit_rate)}, or of the ideal"
    value, ideal = rates["prefix"], rates["ideal"]
    if not stats["enable_prefix_caching"]:
        return _unknown("cache hit rate", target, "prefix caching is off: enable_prefix_caching")
    if value is None:
        return _unknown("cache hit rate", target, "no prompt was looked up in the last minute")
    if rates["page"] is None:
        return _unknown("cache hit rate", target, "no prompt of the last minute was longer than a block")
    verdict, next_step = _judge_hit_rate(value, ideal, targets.hit_rate, minute["num_first_tokens"])
    return Indicator(
        name="cache hit rate",
        value=value,
        shown=_beside(value, targets.hit_rate),
        target=target,
        verdict=verdict,
        note=f"of an ideal {percent(ideal)}, last minute",
        next_step=next_step,
    )


def _judge_hit_rate(value: float, ideal: float, target: float, num_prompts: int) -> tuple[Verdict, str]:
    """The verdict and the next step."""
    if value >= target:
        return "good", ""
    if value < target * ideal:
        return "attention", "Much that was computed is computed again: read the advice; a larger pool keeps more."
    if ideal >= LEAST_IDEAL:
        return "good", ""
    if num_prompts < MIN_PROMPTS:
        return "idle", ""
    return (
        "attention",
        "The prompts share little: put what all share (instructions, tools) first and what varies (time, user, question) last.",
    )


def _ttft(stats: Mapping[str, Any], targets: Targets) -> Indicator:
    minute = stats["last_minute"]
    value, target, num = minute["ttft_p99_s"], f"< {targets.ttft_p99_s:g} s", minute["num_first_tokens"]
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
        note=f"{num} first token{'' if num == 1 else 's'}, last minute",
        next_step="" if is_good else next_step,
    )


_REMEDIES = {
    "blocks": "The pool is full: more KV memory (gpu_memory_utilization, num_kv_blocks), or a smaller max_model_len.",
    "max_num_seqs": "The batch is full: raise max_num_seqs.",
    "token_budget": "A step's budget is spent: raise max_num_batched_tokens.",
    "tenant_quota": "A tenant is at its quota: raise max_running_per_tenant or cache_fraction_per_tenant, or let that tenant wait.",
    "priority": "Requests of a higher priority go first: add a replica if the others must not wait.",
    "batch_window": "An idle engine waits for a fuller batch: lower max_batch_wait_ms.",
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


def _beside(share: float, target: float) -> str:
    """A share as people read it beside its target: one that misses it does not look as if it met it."""
    looks_met = share < target and percent(share) == percent(target)
    return f"{math.floor(share * 1000) / 10:.1f} %" if looks_met else percent(share)
