"""Each command of `pagedcore bench` that makes engines: from a config to results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pagedcore.async_engine import AsyncEngine
from pagedcore.commands.bench.engine_rounds import EngineRounds
from pagedcore.commands.bench.facts import default_label, engine_facts
from pagedcore.commands.bench.latency import LatencyWork, measure_latency
from pagedcore.commands.bench.prefix import PrefixWork, measure_prefix
from pagedcore.commands.bench.results import Command, Fact, Point, Results
from pagedcore.commands.bench.throughput import ThroughputWork, measure_throughput
from pagedcore.commands.progress_bars import progress_bars
from pagedcore.config import EngineConfig, EnginePlan


def run_throughput(config: EngineConfig, work: ThroughputWork, temperature: float, label: str | None) -> Results:
    with open_engine(config) as engine, progress_bars() as progress:
        points = measure_throughput(EngineRounds(engine, temperature), work, progress)
        plan = engine.plan
    asked: dict[str, Fact] = {
        "prompt_tokens": str(work.load.prompt_tokens),
        "shared_tokens": work.load.num_shared_tokens,
        "output_tokens": str(work.load.output_tokens),
        "temperature": temperature,
        "rounds": work.rounds,
        "seed": work.load.seed,
    }
    return _results("throughput", label, plan, asked, points)


def run_latency(config: EngineConfig, work: LatencyWork, label: str | None) -> Results:
    with open_engine(config) as engine, progress_bars() as progress:
        points = measure_latency(EngineRounds(engine), work, progress)
        plan = engine.plan
    asked: dict[str, Fact] = {"output_tokens": work.num_output_tokens, "temperature": 0.0, "rounds": work.rounds, "seed": work.seed}
    return _results("latency", label, plan, asked, points)


def run_prefix(config: EngineConfig, work: PrefixWork, label: str | None) -> Results:
    """One engine after the other."""
    points = []
    with progress_bars() as progress:
        for caches in (True, False):
            with open_engine(config.replace(enable_prefix_caching=caches)) as engine:
                points.append(measure_prefix(EngineRounds(engine), work, progress))
                plan = engine.plan
    load = work.load
    asked: dict[str, Fact] = {
        "num_prompts": load.num_prompts,
        "shared_tokens": load.num_shared_tokens,
        "own_tokens": load.prompt_tokens.low - load.num_shared_tokens,
        "output_tokens": load.output_tokens.low,
        "temperature": 0.0,
        "rounds": work.rounds,
        "seed": load.seed,
    }
    return _results("prefix", label, plan, asked, points)


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(config)
    try:
        yield engine
    finally:
        engine.close_sync()


def _results(command: Command, label: str | None, plan: EnginePlan, work: Mapping[str, Fact], points: Sequence[Point]) -> Results:
    return Results(command=command, label=label or default_label(), facts=engine_facts(plan), work=work, points=points)
