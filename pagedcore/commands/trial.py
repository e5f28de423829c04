"""The speed half of `pagedcore compare`: one engine after the other on the same prompts and requests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedcore.async_engine import AsyncEngine
from pagedcore.commands.comparison import SpeedScope, TrafficReport, TrafficScope
from pagedcore.commands.throughput import Result, run_prompts
from pagedcore.config import EngineConfig, EnginePlan
from pagedcore.errors import ConfigError, EngineError, InvalidRequestError, PromptTooLongError
from pagedcore.models.progress import Progress
from pagedcore.observe.stats import StatsSnapshot
from pagedcore.text.tokenizer import Tokenizer
from pagedcore.warm_up import WarmUpPrompt

MAX_PROMPTS = 16
MAX_PROMPT_TOKENS = 128
OUTPUT_TOKENS = 32
ROUNDS = 3
"""An odd number: one of them is the median."""
MAX_EMPTYING_S = 10.0

TokenIds = Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests that both engines answer: in this order, `concurrency` in flight."""

    prompts: Sequence[WarmUpPrompt]
    concurrency: int = 8
    output_tokens: int = 16
    """Of each request; an end-of-sequence token does not end it."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of the traffic is {getattr(self, name)} and must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What both engines are asked, as token ids."""

    prompts: Sequence[TokenIds]
    output_tokens: int
    requests: Sequence[TokenIds]
    """Of the traffic; empty without."""
    traffic: Traffic | None

    def speed_scope(self) -> SpeedScope:
        return SpeedScope(
            num_prompts=len(self.prompts), prompt_tokens=len(self.prompts[0]), output_tokens=self.output_tokens, num_rounds=ROUNDS
        )

    def traffic_scope(self) -> TrafficScope | None:
        if self.traffic is None:
            return None
        return TrafficScope(
            num_requests=len(self.requests),
            num_prompt_tokens=sum(len(request) for request in self.requests),
            output_tokens=self.traffic.output_tokens,
            concurrency=self.traffic.concurrency,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What one engine made of a trial."""

    plan: EnginePlan
    rounds: Sequence[Result]
    """The same prompts, `ROUNDS` times; the slowest round first, the fastest last."""
    traffic: TrafficReport | None

    @property
    def slowest_round(self) -> Result:
        return self.rounds[0]

    @property
    def median_round(self) -> Result:
        return self.rounds[len(self.rounds) // 2]

    @property
    def fastest_round(self) -> Result:
        return self.rounds[-1]


def make_trial(token_ids: TokenIds, traffic: Traffic | None, tokenizer: Tokenizer, max_model_len: int) -> Trial:
    """Prompts cut from a text, and the traffic's requests as `tokenizer` and its chat template read them.

    Raises `InvalidRequestError` for traffic without requests, `PromptTooLongError` for a request that the models cannot hold.
    """
    output_tokens = min(OUTPUT_TOKENS, max(1, max_model_len // 2))
    requests = [] if traffic is None else _requests(traffic, tokenizer, max_model_len)
    prompts = cut_prompts(token_ids, min(MAX_PROMPT_TOKENS, max(1, max_model_len - output_tokens)))
    return Trial(prompts=prompts, output_tokens=output_tokens, requests=requests, traffic=traffic)


def cut_prompts(token_ids: TokenIds, num_tokens: int) -> list[TokenIds]:
    """At most `MAX_PROMPTS` pieces of `num_tokens` tokens, or of the whole shorter text, spread evenly; no two begin at one place."""
    num_tokens = min(num_tokens, len(token_ids))
    num_starts = len(token_ids) - num_tokens + 1
    count = min(MAX_PROMPTS, num_starts)
    starts = [index * (num_starts - 1) // max(count - 1, 1) for index in range(count)]
    return [token_ids[start : start + num_tokens] for start in starts]


def run_trial(label: str, config: EngineConfig, trial: Trial, progress: Progress) -> TrialResult:
    """Make an engine, answer the prompts once untimed, then the traffic, then the prompts in `ROUNDS` rounds; close it.

    The traffic and each round begin with an empty prefix cache. What a process pays once, for shapes that are new to it, would
    count against the model that comes first.
    Raises what the engine raises, and the first failure of a request.
    """
    engine = AsyncEngine(config)
    try:
        run_prompts(engine, trial.prompts, trial.output_tokens, _counter(f"Warming up {label}", len(trial.prompts), progress))
        _empty_prefix_cache(engine)
        traffic = None if trial.traffic is None else _run_traffic(label, engine, trial.traffic, trial.requests, progress)
        return TrialResult(plan=engine.plan, rounds=_run_rounds(label, engine, trial, progress), traffic=traffic)
    finally:
        engine.close_sync()


def _run_rounds(label: str, engine: AsyncEngine, trial: Trial, progress: Progress) -> list[Result]:
    """The slowest first."""
    advance = _counter(f"Timing {label}", ROUNDS * len(trial.prompts), progress)
    rounds = []
    for _ in range(ROUNDS):
        _empty_prefix_cache(engine)
        rounds.append(run_prompts(engine, trial.prompts, trial.output_tokens, advance))
    return sorted(rounds, key=lambda result: result.output_tokens_per_s)


def _empty_prefix_cache(engine: AsyncEngine) -> None:
    """A step in flight may still hold blocks of a request that has ended; each call lets the engine go on.

    Raises `EngineError` when blocks are held for longer than `MAX_EMPTYING_S`.
    """
    deadline_s = time.monotonic() + MAX_EMPTYING_S
    while not engine.reset_prefix_cache():
        engine.check()
        if time.monotonic() > deadline_s:
            raise EngineError(_what_holds_blocks(engine.stats()))


def _what_holds_blocks(stats: StatsSnapshot) -> str:
    return (
        f"The prefix cache could not be emptied within {MAX_EMPTYING_S:g} s: {stats.num_active_blocks} KV blocks are held by "
        f"{stats.num_running} running and {stats.num_waiting} waiting requests, or by a step in flight."
    )


def _run_traffic(label: str, engine: AsyncEngine, traffic: Traffic, requests: Sequence[TokenIds], progress: Progress) -> TrafficReport:
    before = engine.stats()
    advance = _counter(f"Traffic {label}", len(requests), progress)
    result = run_prompts(engine, requests, traffic.output_tokens, advance, concurrency=traffic.concurrency)
    stats, plan = engine.stats() - before, engine.plan
    return TrafficReport(
        page_hit_rate=stats.hit_rate("page"),
        prefix_hit_rate=stats.hit_rate("prefix"),
        pool_hit_rate=stats.hit_rate("pool"),
        kv_cache_bytes=plan.memory.kv_cache_bytes,
        num_blocks=plan.num_blocks,
        pool_tokens=plan.num_blocks * plan.block_size,
        output_tokens_per_s=result.output_tokens_per_s,
        first_token_p50_s=result.first_token_p50_s,
    )


def _requests(traffic: Traffic, tokenizer: Tokenizer, max_model_len: int) -> Sequence[TokenIds]:
    if not traffic.prompts:
        raise InvalidRequestError("The traffic file holds no requests; give a JSON list, or one text a line.", param="traffic")
    requests = [_token_ids(prompt, tokenizer) for prompt in traffic.prompts]
    longest = max(range(len(requests)), key=lambda index: len(requests[index]))
    num_tokens = len(requests[longest])
    if num_tokens + traffic.output_tokens > max_model_len:
        raise PromptTooLongError(
            f"Request {longest + 1} of the traffic has {num_tokens} tokens, and with {traffic.output_tokens} output tokens that is "
            f"more than the smaller max_model_len of the two models, {max_model_len}.",
            param="traffic",
        )
    return requests


def _token_ids(prompt: WarmUpPrompt, tokenizer: Tokenizer) -> list[int]:
    """As a client's request: a conversation is to be answered."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.encode(tokenizer.render_chat(prompt), add_special_tokens=False)


def _counter(what: str, total: int, progress: Progress) -> Callable[[], None]:
    """To be called as each of `total` ends, also from several threads."""
    numbers = itertools.count(1)
    progress(what, 0, total)
    return lambda: progress(what, next(numbers), total)
