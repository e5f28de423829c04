"""What prefix-affine routing gains: four engines' schedulers without a model, conversations with shared beginnings, three policies.

python -m bench.routing [--conversations 400] [--rate 24] [--blocks 1024]

Time is simulated: a step costs STEP_S and TOKEN_S for each token that is computed. Every policy sees the same arrivals.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from pagedcore.core.limits import SchedulerLimits
from pagedcore.core.scheduler import Scheduler
from pagedcore.core.step import StepPlan, StepResult
from pagedcore.messages import AddRequest
from pagedcore.routing.prefix_keys import PrefixKey, prefix_keys
from pagedcore.routing.router import Router, RoutingPolicy
from pagedcore.sampling_params import SamplingParams

STEP_S = 0.012
TOKEN_S = 80e-6
BLOCK_SIZE = 16
NUM_SYSTEM_PROMPTS = 48
SYSTEM_TOKENS = 640
TURN_TOKENS = 48
ANSWER_TOKENS = 64
NUM_TURNS = 4
THINK_S = 4.0

Place = Callable[[Sequence[PrefixKey]], int]
"""Prompt -> worker; the load of the worker grows."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation."""

    at_s: float
    name: str
    token_ids: list[int]


@dataclass(slots=True)
class Worker:
    """One engine: a real scheduler and pool, its own clock, and a device that takes simulated time."""

    scheduler: Scheduler
    now_s: float = 0.0
    num_open: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    first_token_s: dict[str, float] = field(default_factory=dict)

    def run_until(self, end_s: float) -> list[float]:
        """Compute until this time; when requests ended."""
        ends: list[float] = []
        while self.now_s < end_s and (plan := self.scheduler.schedule(self.now_s)) is not None:
            self.now_s += STEP_S + TOKEN_S * plan.total_num_tokens
            ends += self._commit(plan)
        self.now_s = max(self.now_s, end_s)
        return ends

    def _commit(self, plan: StepPlan) -> list[float]:
        self.scheduler.commit(plan, StepResult(step_id=plan.step_id, sampled_token_ids=[0] * sum(plan.samples)), self.now_s)
        self.scheduler.take_events()
        ends = []
        for update in self.scheduler.take_updates():
            self.first_token_s.setdefault(update.request_id, self.now_s)
            if update.finish_reason is not None:
                assert update.cache is not None, "the last update has the report"
                self.query_tokens += update.cache.num_prompt_tokens
                self.hit_tokens += update.cache.num_cached_tokens
                self.num_open -= 1
                ends.append(self.now_s)
        return ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one policy made of the traffic."""

    policy: str
    hit_rate: float
    max_over_mean_load: float
    """Largest number of open requests of one worker over the mean of all, at the arrivals when 16 or more are open."""
    max_excess: int
    """Largest number of open requests of one worker beyond `RoutingPolicy.load_limit`, at any arrival; negative below."""
    ttft_p50_ms: float
    ttft_p99_ms: float


def make_traffic(num_conversations: int, rate: float, seed: int = 0) -> list[Turn]:
    """Conversations of `NUM_TURNS` turns that begin `rate` times a second with one of `NUM_SYSTEM_PROMPTS` texts, a few far more often."""
    draw = random.Random(seed)
    systems = [draw.choices(range(30_000), k=SYSTEM_TOKENS) for _ in range(NUM_SYSTEM_PROMPTS)]
    weights = list(accumulate(1.0 / (rank + 1) for rank in range(NUM_SYSTEM_PROMPTS)))
    turns: list[Turn] = []
    start_s = 0.0
    for number in range(num_conversations):
        start_s += draw.expovariate(rate)
        tokens, at_s = list(draw.choices(systems, cum_weights=weights)[0]), start_s
        for turn in range(NUM_TURNS):
            tokens = tokens + draw.choices(range(30_000), k=TURN_TOKENS)
            turns.append(Turn(at_s, f"{number}-{turn}", tokens))
            tokens = tokens + [0] * ANSWER_TOKENS
            at_s += THINK_S + draw.expovariate(1.0 / THINK_S)
    return sorted(turns, key=lambda turn: turn.at_s)


def simulate(name: str, turns: Sequence[Turn], num_workers: int, num_blocks: int) -> Result:
    """Play the traffic under one of `POLICIES`."""
    workers = [Worker(Scheduler(make_limits(num_blocks))) for _ in range(num_workers)]
    router = Router(num_workers, num_blocks)
    place = POLICIES[name](router)
    spreads, excesses, ttfts = [1.0], [-RoutingPolicy().free_load], []
    for turn in turns:
        for index, worker in enumerate(workers):
            for _ in worker.run_until(turn.at_s):
                router.release(index)
        request = make_request(turn)
        chosen = place(prefix_keys(request, BLOCK_SIZE))
        workers[chosen].num_open += 1
        workers[chosen].scheduler.add(request, turn.at_s)
        loads = [worker.num_open for worker in workers]
        spreads += [max(loads) * num_workers / sum(loads)] if sum(loads) >= 16 else []
        excesses.append(loads[chosen] - RoutingPolicy().load_limit(sum(loads), num_workers))
    for worker in workers:
        worker.run_until(turns[-1].at_s + 600.0)
    arrivals = {turn.name: turn.at_s for turn in turns}
    ttfts = sorted(at_s - arrivals[request_id] for worker in workers for request_id, at_s in worker.first_token_s.items())
    return Result(
        policy=name,
        hit_rate=sum(worker.hit_tokens for worker in workers) / sum(worker.query_tokens for worker in workers),
        max_over_mean_load=max(spreads),
        max_excess=max(excesses),
        ttft_p50_ms=1000 * statistics.median(ttfts),
        ttft_p99_ms=1000 * ttfts[int(0.99 * (len(ttfts) - 1))],
    )


def make_limits(num_blocks: int) -> SchedulerLimits:
    """An engine of the size of the bench."""
    return SchedulerLimits(block_size=BLOCK_SIZE, num_blocks=num_blocks, max_model_len=4096, max_num_seqs=128, max_num_batched_tokens=2048)


def make_request(turn: Turn) -> AddRequest:
    params = SamplingParams(max_tokens=ANSWER_TOKENS, seed=0)
    return AddRequest(request_id=turn.name, group_id=turn.name, prompt_token_ids=turn.token_ids, params=params, arrival_s=turn.at_s)


def round_robin(router: Router) -> Place:
    """Each worker in turn."""

    def numbers() -> Iterator[int]:
        while True:
            yield from range(len(router.own_loads))

    turn = numbers()

    def place(_: Sequence[PrefixKey]) -> int:
        router.take(worker_id := next(turn))
        return worker_id

    return place


def least_loaded(router: Router) -> Place:
    """The worker with the fewest open requests."""
    return lambda _: router.place([], range(len(router.own_loads))).worker_id


def prefix_affine(router: Router) -> Place:
    """What `build_server` does."""
    return lambda keys: router.place(keys, range(len(router.own_loads))).worker_id


POLICIES: dict[str, Callable[[Router], Place]] = {
    "round robin": round_robin,
    "least loaded": least_loaded,
    "prefix-affine": prefix_affine,
}


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--rate", type=float, default=24.0, help="conversations that begin a second")
    parser.add_argument("--blocks", type=int, default=1024, help=f"KV blocks of {BLOCK_SIZE} tokens of each worker")
    arguments = parser.parse_args()
    turns = make_traffic(arguments.conversations, arguments.rate)
    table = Table(
        "policy", "hit rate", "max/mean load", "TTFT p50 ms", "TTFT p99 ms", title=f"{arguments.workers} workers, {len(turns)} requests"
    )
    for name in POLICIES:
        result = simulate(name, turns, arguments.workers, arguments.blocks)
        figures = (f"{result.hit_rate:.1%}", f"{result.max_over_mean_load:.2f}", f"{result.ttft_p50_ms:.0f}", f"{result.ttft_p99_ms:.0f}")
        table.add_row(name, *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
