"""`pagedcore bench`: a small throughput run of random prompts, all at once, on the given model."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedcore.outputs import RequestOutput, RequestTimings
from pagedcore.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedcore.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of the engine. The first `num_shared_tokens` of every prompt are the same."""

    num_prompts: int
    num_prompt_tokens: int
    num_shared_tokens: int
    num_output_tokens: int
    seed: int = 0

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random token ids, the same for the same seed."""
        draw = random.Random(self.seed)
        shared = [draw.randrange(vocab_size) for _ in range(min(self.num_shared_tokens, self.num_prompt_tokens))]
        own = self.num_prompt_tokens - len(shared)
        return [shared + [draw.randrange(vocab_size) for _ in range(own)] for _ in range(self.num_prompts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one run took; times in seconds."""

    wall_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    first_token_s: list[float]
    per_output_token_s: list[float]

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.wall_s

    @property
    def first_token_p50_s(self) -> float:
        return _quantile(self.first_token_s, 0.5)

    def rows(self) -> list[tuple[str, str]]:
        """The table's lines."""
        return [
            ("output tokens per second", f"{self.output_tokens_per_s:,.1f}"),
            ("all tokens per second", f"{(self.num_prompt_tokens + self.num_output_tokens) / self.wall_s:,.1f}"),
            ("prompt / output tokens", f"{self.num_prompt_tokens:,} / {self.num_output_tokens:,}"),
            ("prompt tokens from the prefix cache", f"{self.num_cached_tokens:,} ({self.num_cached_tokens / self.num_prompt_tokens:.0%})"),
            ("time to first token, p50 / p99", _milliseconds(self.first_token_s)),
            ("time per output token, p50 / p99", _milliseconds(self.per_output_token_s)),
            ("wall time", f"{self.wall_s:.2f} s"),
        ]


def run_load(engine: AsyncEngine, load: Load, advance: Callable[[], None]) -> Result:
    """Send every prompt of the load at once and wait for all. See `run_prompts`."""
    return run_prompts(engine, load.prompts(engine.info.vocab_size), load.num_output_tokens, advance)


def run_prompts(
    engine: AsyncEngine,
    prompts: Sequence[Sequence[int]],
    num_output_tokens: int,
    advance: Callable[[], None],
    *,
    concurrency: int | None = None,
) -> Result:
    """Send prompts in their order, `concurrency` at a time (None is all at once), and wait for all; `advance` is called as each
    one ends. Raises the first failure.

    A failure, or Ctrl-C, closes the engine: the threads that wait for the other requests end with them.
    """
    params = SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True, detokenize=False)

    def run_one(prompt: Sequence[int]) -> RequestOutput:
        *_, last = engine.generate_sync(prompt, params)
        advance()
        return last

    start = time.perf_counter()
    with ThreadPoolExecutor(max_workers=concurrency or len(prompts)) as threads:
        try:
            outputs = list(threads.map(run_one, prompts))
        except BaseException:
            engine.close_sync()
            raise
    return _result(outputs, time.perf_counter() - start)


def _result(outputs: list[RequestOutput], wall_s: float) -> Result:
    for output in outputs:
        if output.error is not None:
            raise output.error
    timings = [output.timings for output in outputs if output.timings is not None]
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    return Result(
        wall_s=wall_s,
        num_prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
        num_output_tokens=sum(counts),
        first_token_s=[_span(t.arrival_s, t.first_token_s) for t in timings],
        per_output_token_s=[_decode_s(t) / (count - 1) for t, count in zip(timings, counts, strict=True) if count > 1],
    )


def _span(start_s: float | None, end_s: float | None) -> float:
    return 0.0 if start_s is None or end_s is None else end_s - start_s


def _decode_s(timings: RequestTimings) -> float:
    return _span(timings.first_token_s, timings.finished_s)


def _milliseconds(values: list[float]) -> str:
    if not values:
        return "-"
    p50, p99 = (_quantile(values, share) for share in (0.5, 0.99))
    return f"{1000 * p50:,.1f} / {1000 * p99:,.1f} ms"


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
