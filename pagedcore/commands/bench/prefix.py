"""`pagedcore bench prefix`: prompts that share their beginning, with the prefix cache beside without."""

from __future__ import annotations

from dataclasses import dataclass

from pagedcore.commands.bench.engine_rounds import EngineRounds
from pagedcore.commands.bench.progress import counter
from pagedcore.commands.bench.results import Point
from pagedcore.commands.bench.spread import Spread, percentile
from pagedcore.commands.bench.workloads import Load
from pagedcore.models.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixWork:
    """What is asked: one load, all at once."""

    load: Load
    rounds: int


def measure_prefix(engine: EngineRounds, work: PrefixWork, progress: Progress) -> Point:
    """One point: the engine with its prefix cache as its config says, empty before each round."""
    caches = engine.engine.plan.config.enable_prefix_caching
    requests = work.load.requests(engine.engine.info.vocab_size)
    advance = counter(f"prefix caching {'on' if caches else 'off'}", work.rounds * len(requests), progress)
    engine.warm_up(requests, len(requests))
    rounds, hit_rates = [], []
    for _ in range(work.rounds):
        before = engine.engine.stats()
        rounds.append(engine.run(requests, len(requests), advance))
        hit_rates.append((engine.engine.stats() - before).hit_rate("prefix"))
    return {
        "prefix_caching": caches,
        "hit_rate": Spread.median_of(hit_rates),
        "wall_s": Spread.over(rounds, lambda r: r.wall_s),
        "output_tokens_per_s": Spread.over(rounds, lambda r: r.output_tokens_per_s),
        "first_token_p50_ms": Spread.over(rounds, lambda r: 1000 * percentile(r.first_token_s, 0.5)),
        "first_token_p99_ms": Spread.over(rounds, lambda r: 1000 * percentile(r.first_token_s, 0.99)),
        "num_prompt_tokens": rounds[0].num_prompt_tokens,
        "num_cached_tokens": rounds[0].num_cached_tokens,
        "num_output_tokens": rounds[0].num_output_tokens,
    }
