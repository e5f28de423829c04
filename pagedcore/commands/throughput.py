"""Prompts through an engine of this process, and what they took."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedcore.commands.bench.spread import percentile
from pagedcore.outputs import RequestOutput, RequestTimings
from pagedcore.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedcore.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one run took; times in seconds."""

    wall_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    first_token_s: list[float]
    per_output_token_s: list[float]
    """Of each request with two tokens or more: (last - first) / (tokens - 1)."""

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.wall_s

    @property
    def first_token_p50_s(self) -> float:
        return percentile(self.first_token_s, 0.5)


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
    return result_of(outputs, time.perf_counter() - start)


def result_of(outputs: Sequence[RequestOutput], wall_s: float) -> Result:
    """Add up requests that have ended. Raises the error of the first that failed."""
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
