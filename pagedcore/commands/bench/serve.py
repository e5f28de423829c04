"""`pagedcore bench serve`: streams against an OpenAI-compatible server, ours or another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from pagedcore.commands.bench.online_load import Answered, OnlineRound, Share, deal, make_calls
from pagedcore.commands.bench.online_stream import Endpoint
from pagedcore.commands.bench.progress import counter
from pagedcore.commands.bench.results import Point
from pagedcore.commands.bench.spread import Spread, percentile, weighted_percentile
from pagedcore.commands.bench.throughput import PROMPTS_AT_ONCE, PROMPTS_EACH_IN_FLIGHT, check_enough_prompts
from pagedcore.commands.bench.workloads import BenchRequest, Load
from pagedcore.errors import ConfigError
from pagedcore.models.progress import Progress

MAX_TOKEN_ID = 10_000
"""Prompts are random ids below it: every common vocabulary has them."""
PROMPTS_AT_A_RATE = 64
WARM_UP_TOKENS = 8

RunOnline = Callable[[Sequence[Share]], OnlineRound]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeWork:
    """What is asked of the server."""

    load: Load
    """Its number of prompts is set for each point."""
    num_prompts: int | None
    concurrency: Sequence[int] | None = None
    """Streams in flight, one point each."""
    rates: Sequence[float] | None = None
    """Arrivals a second (Poisson), one point each."""
    temperature: float = 0.0
    counts_each: bool = False
    """The server is asked for its count of tokens in every event."""
    num_processes: int = 4
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.rates is not None:
            raise ConfigError("--concurrency keeps a number in flight and --rate sends at random times; give one of them.")
        check_enough_prompts(self.num_prompts, self.concurrency)

    def arrivals(self) -> list[Arrivals]:
        if self.concurrency is not None:
            return [Arrivals(concurrency=n, num_prompts=self.num_prompts or PROMPTS_EACH_IN_FLIGHT * n) for n in self.concurrency]
        if self.rates is not None:
            return [Arrivals(rate=rate, num_prompts=self.num_prompts or PROMPTS_AT_A_RATE) for rate in self.rates]
        return [Arrivals(num_prompts=self.num_prompts or PROMPTS_AT_ONCE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When the requests of one point are sent: all at once, a number in flight, or at random times."""

    num_prompts: int
    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} a second"
        return f"{self.num_prompts} at once" if self.concurrency is None else f"{self.concurrency} in flight"


def measure_serve(endpoint: Endpoint, work: ServeWork, run: RunOnline, progress: Progress) -> list[Point]:
    """A point for each rate or number in flight. No two rounds have a prompt in common, so that no cache of another round helps."""
    points: list[Point] = []
    for index, arrivals in enumerate(work.arrivals()):
        advance = counter(str(arrivals), work.rounds, progress)
        seeds = [f"{work.load.seed}/{index}/{number}" for number in range(work.rounds + 1)]
        run(_shares(endpoint, work, arrivals, seeds[0], is_warm_up=True))
        rounds = []
        for seed in seeds[1:]:
            rounds.append(run(_shares(endpoint, work, arrivals, seed)))
            advance()
        points.append(point_of(arrivals, rounds))
    return points


def point_of(arrivals: Arrivals, rounds: Sequence[OnlineRound]) -> Point:
    return {
        "load": str(arrivals),
        "concurrency": arrivals.concurrency if arrivals.rate is None and arrivals.concurrency else arrivals.num_prompts,
        "rate": arrivals.rate,
        "num_requests": arrivals.num_prompts,
        "num_output_tokens": Spread.over(rounds, num_tokens),
        "output_tokens_per_s": Spread.over(rounds, tokens_per_s),
        "first_token_p50_ms": Spread.over(rounds, lambda r: 1000 * percentile(first_token_s(r), 0.5)),
        "first_token_p99_ms": Spread.over(rounds, lambda r: 1000 * percentile(first_token_s(r), 0.99)),
        "inter_token_p50_ms": Spread.over(rounds, lambda r: 1000 * weighted_percentile(inter_token_s(r), 0.5)),
        "inter_token_p99_ms": Spread.over(rounds, lambda r: 1000 * weighted_percentile(inter_token_s(r), 0.99)),
        "settled_inter_token_p50_ms": Spread.over(rounds, lambda r: 1000 * weighted_percentile(settled_inter_token_s(r), 0.5)),
        "settled_inter_token_p99_ms": Spread.over(rounds, lambda r: 1000 * weighted_percentile(settled_inter_token_s(r), 0.99)),
        "end_to_end_p50_s": Spread.over(rounds, lambda r: percentile(end_to_end_s(r), 0.5)),
        "end_to_end_p99_s": Spread.over(rounds, lambda r: percentile(end_to_end_s(r), 0.99)),
        "client_cpu_fraction": Spread.over(rounds, lambda r: r.client_cpu_fraction),
        "client_late_p99_ms": Spread.over(rounds, lambda r: 1000 * percentile([one.stream.sent_s - one.due_s for one in r.answered], 0.99)),
    }


def num_tokens(result: OnlineRound) -> int:
    return sum(one.stream.num_tokens or 0 for one in result.answered)


def tokens_per_s(result: OnlineRound) -> float:
    """From when the first request was due until the last token came."""
    begin = min(one.due_s for one in result.answered)
    return num_tokens(result) / (max(one.stream.arrivals[-1][0] for one in result.answered) - begin)


def first_token_s(result: OnlineRound) -> list[float]:
    return [one.stream.arrivals[0][0] - one.due_s for one in result.answered]


def end_to_end_s(result: OnlineRound) -> list[float]:
    return [one.stream.arrivals[-1][0] - one.due_s for one in result.answered]


def inter_token_s(result: OnlineRound) -> list[tuple[float, float]]:
    """(seconds a token, tokens) of each arrival after the first of its stream."""
    return [gap for one in result.answered for gap in _gaps(one)]


def settled_inter_token_s(result: OnlineRound) -> list[tuple[float, float]]:
    """Those that began when every stream had its first token, so that no prompt was computed beside them. There may be none."""
    last_first_s = max(one.stream.arrivals[0][0] for one in result.answered)
    return [gap for one in result.answered for gap in _gaps(one, last_first_s)]


def _gaps(one: Answered, since_s: float = 0.0) -> list[tuple[float, float]]:
    """Where the server counts in every event, by its counts; else an arrival brings its stream's mean number of tokens."""
    arrivals = one.stream.arrivals
    mean = (one.stream.num_tokens or 0) / len(arrivals)
    gaps = []
    for (earlier_s, before), (later_s, after) in pairwise(arrivals):
        tokens = mean if before is None or after is None else after - before
        if tokens > 0 and earlier_s >= since_s:
            gaps.append(((later_s - earlier_s) / tokens, float(tokens)))
    return gaps


def _shares(endpoint: Endpoint, work: ServeWork, arrivals: Arrivals, seed: str, *, is_warm_up: bool = False) -> list[Share]:
    load = replace(work.load, num_prompts=arrivals.num_prompts, seed=seed)
    requests = load.requests(MAX_TOKEN_ID)
    if is_warm_up:
        requests = [BenchRequest(prompt=r.prompt, num_output_tokens=min(r.num_output_tokens, WARM_UP_TOKENS)) for r in requests]
    counting = {"include_usage": True, **({"continuous_usage_stats": True} if work.counts_each else {})}
    options: dict[str, Any] = {"model": endpoint.model, "temperature": work.temperature, "stream_options": counting}
    rate = None if is_warm_up else arrivals.rate
    calls = make_calls(requests, options, rate, seed)
    return deal(endpoint, calls, arrivals.concurrency, work.num_processes)
