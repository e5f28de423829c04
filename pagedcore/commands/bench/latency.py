"""`pagedcore bench latency`: milliseconds of a token at batch sizes and contexts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pagedcore.commands.bench.engine_rounds import EngineRounds
from pagedcore.commands.bench.lengths import Lengths
from pagedcore.commands.bench.progress import counter
from pagedcore.commands.bench.results import Point
from pagedcore.commands.bench.spread import Spread
from pagedcore.commands.bench.throughput import check_runs_at_once
from pagedcore.commands.bench.workloads import BenchRequest, Load
from pagedcore.config import EnginePlan
from pagedcore.errors import ConfigError
from pagedcore.models.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyWork:
    """What is asked: each batch at each context."""

    batches: Sequence[int]
    contexts: Sequence[int]
    """Tokens of each prompt."""
    num_output_tokens: int
    rounds: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_output_tokens < 2:
            raise ConfigError(f"--output-tokens is {self.num_output_tokens} and must be at least 2: the first token is measured apart.")


def measure_latency(engine: EngineRounds, work: LatencyWork, progress: Progress) -> list[Point]:
    """A point for each batch and context. Raises `ConfigError` for one that the engine cannot hold at once."""
    plan, points = engine.engine.plan, list(itertools.product(work.batches, work.contexts))
    for batch, context in points:
        _check_fits(plan, batch, context + work.num_output_tokens)
    return [_measure(engine, work, batch, context, progress) for batch, context in points]


def per_token_ms(first_s: Sequence[float], whole_s: Sequence[float], num_output_tokens: int) -> Spread:
    """(median of the times of n tokens - median of those of one) / (n - 1); each round is its own pair's difference."""
    scale = 1000 / (num_output_tokens - 1)
    value = (Spread.median_of(whole_s).value - Spread.median_of(first_s).value) * scale
    return Spread(value, tuple((whole - first) * scale for first, whole in zip(first_s, whole_s, strict=True)))


def _measure(engine: EngineRounds, work: LatencyWork, batch: int, context: int, progress: Progress) -> Point:
    whole = _requests(engine, work, batch, context)
    first = [BenchRequest(prompt=request.prompt, num_output_tokens=1) for request in whole]
    advance = counter(f"batch {batch}, context {context}", 2 * work.rounds * batch, progress)
    engine.warm_up(whole, batch)
    first_s, whole_s = [], []
    for _ in range(work.rounds):
        first_s.append(engine.run(first, batch, advance).wall_s)
        whole_s.append(engine.run(whole, batch, advance).wall_s)
    return {
        "batch": batch,
        "context": context,
        "per_token_ms": per_token_ms(first_s, whole_s, work.num_output_tokens),
        "first_token_ms": Spread.median_of(first_s).times(1000),
        "whole_s": Spread.median_of(whole_s),
    }


def _requests(engine: EngineRounds, work: LatencyWork, batch: int, context: int) -> list[BenchRequest]:
    load = Load(
        num_prompts=batch,
        prompt_tokens=Lengths(context, context),
        output_tokens=Lengths(work.num_output_tokens, work.num_output_tokens),
        seed=work.seed,
    )
    return load.requests(engine.engine.info.vocab_size)


def _check_fits(plan: EnginePlan, batch: int, num_tokens: int) -> None:
    check_runs_at_once(batch, plan.config.max_num_seqs, "--batch")
    needed = batch * -(-num_tokens // plan.block_size)
    if needed > plan.num_blocks:
        raise ConfigError(
            f"A batch of {batch} with {num_tokens} tokens each needs {needed} KV blocks and the pool has {plan.num_blocks}: requests would "
            "wait for one another; take smaller batches or contexts, or raise --gpu-memory-utilization or --num-kv-blocks."
        )
