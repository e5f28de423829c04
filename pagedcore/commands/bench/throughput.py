"""`pagedcore bench throughput`: many requests, a fixed number in flight, tokens a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagedcore.commands.bench.engine_rounds import EngineRounds
from pagedcore.commands.bench.progress import counter
from pagedcore.commands.bench.results import Point
from pagedcore.commands.bench.spread import Spread, percentile
from pagedcore.commands.bench.workloads import Load
from pagedcore.commands.throughput import Result
from pagedcore.errors import ConfigError
from pagedcore.models.progress import Progress

PROMPTS_EACH_IN_FLIGHT = 4
"""Requests for each one in flight where their number is not given."""
PROMPTS_AT_ONCE = 16
"""Requests where neither number is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputWork:
    """What is asked: one load for each number in flight."""

    load: Load
    """Its number of prompts is set for each point."""
    num_prompts: int | None
    concurrency: Sequence[int] | None
    """Requests in flight, one point each; None sends all at once."""
    rounds: int

    def __post_init__(self) -> None:
        check_enough_prompts(self.num_prompts, self.concurrency)

    def loads(self) -> list[tuple[int, Load]]:
        """Requests in flight, and the load, of each point."""
        if self.concurrency is None:
            count = self.num_prompts or PROMPTS_AT_ONCE
            return [(count, replace(self.load, num_prompts=count))]
        return [(n, replace(self.load, num_prompts=self.num_prompts or PROMPTS_EACH_IN_FLIGHT * n)) for n in self.concurrency]


def measure_throughput(engine: EngineRounds, work: ThroughputWork, progress: Progress) -> list[Point]:
    """A point for each number in flight. Raises `ConfigError` for a number that the engine would not run at once."""
    limit = engine.engine.plan.config.max_num_seqs
    for number in work.concurrency or ():
        check_runs_at_once(number, limit, "--concurrency")
    return [_measure(engine, load, concurrency, work.rounds, progress) for concurrency, load in work.loads()]


def check_runs_at_once(number: int, max_num_seqs: int, flag: str) -> None:
    """Raise `ConfigError` where requests would wait that are to be in flight."""
    if number > max_num_seqs:
        raise ConfigError(f"{flag} {number} is more than max_num_seqs, {max_num_seqs}: the rest would wait; raise --max-num-seqs.")


def check_enough_prompts(num_prompts: int | None, concurrency: Sequence[int] | None) -> None:
    """Raise `ConfigError` for fewer requests than are to be in flight."""
    most = max(concurrency or [0])
    if num_prompts is not None and num_prompts < most:
        raise ConfigError(
            f"--num-prompts {num_prompts} are too few for --concurrency {most}: so many were never in flight; raise it, or leave it out."
        )


def _measure(engine: EngineRounds, load: Load, concurrency: int, num_rounds: int, progress: Progress) -> Point:
    requests = load.requests(engine.engine.info.vocab_size)
    advance = counter(f"{concurrency} in flight", num_rounds * len(requests), progress)
    engine.warm_up(requests, concurrency)
    return _point(concurrency, [engine.run(requests, concurrency, advance) for _ in range(num_rounds)])


def _point(concurrency: int, rounds: Sequence[Result]) -> Point:
    first = rounds[0]
    return {
        "concurrency": concurrency,
        "num_requests": len(first.first_token_s),
        "num_prompt_tokens": first.num_prompt_tokens,
        "num_output_tokens": first.num_output_tokens,
        "cached_fraction": first.num_cached_tokens / first.num_prompt_tokens,
        "output_tokens_per_s": Spread.over(rounds, lambda r: r.output_tokens_per_s),
        "tokens_per_s": Spread.over(rounds, lambda r: (r.num_prompt_tokens + r.num_output_tokens) / r.wall_s),
        "wall_s": Spread.over(rounds, lambda r: r.wall_s),
        "first_token_p50_ms": Spread.over(rounds, lambda r: 1000 * percentile(r.first_token_s, 0.5)),
        "first_token_p99_ms": Spread.over(rounds, lambda r: 1000 * percentile(r.first_token_s, 0.99)),
        "per_token_p50_ms": Spread.over(rounds, lambda r: 1000 * percentile(r.per_output_token_s, 0.5)),
        "per_token_p99_ms": Spread.over(rounds, lambda r: 1000 * percentile(r.per_output_token_s, 0.99)),
    }
