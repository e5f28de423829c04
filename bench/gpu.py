"""The engine on a GPU, random weights: throughput on mixed lengths, decode latency, a shared prefix, long contexts.

python -m bench.gpu --shape qwen3-0.6b --work w1 w2 [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu_workloads import SHAPES, equal_prompts, long_prompts, mixed_lengths, shared_prefix, write_shape
from pagedcore import LLM, SamplingParams

LATENCY_TOKENS = 256


class Report:
    """Owns the lines measured; each is printed as it comes."""

    def __init__(self, shape: str) -> None:
        self._facts = {"shape": shape, "card": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": _commit()}
        self.lines: list[dict[str, Any]] = []

    def add(self, **values: Any) -> None:
        self.lines.append({**self._facts, **values})
        print(" ".join(f"{key}={value}" for key, value in {"shape": self._facts["shape"], **values}.items()), flush=True)


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def throughput(llm: LLM, report: Report, rounds: int) -> None:
    """W1: 256 requests at once."""
    prompts, lengths = mixed_lengths()
    params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
    llm.generate(prompts[:8], params[:8])
    for _ in range(rounds):
        llm.reset_prefix_cache()
        seconds = timed(lambda: llm.generate(prompts, params, use_tqdm=False))
        report.add(work="w1", s=round(seconds, 3), output_tokens_per_s=round(sum(lengths) / seconds, 1))


def latency(llm: LLM, report: Report, rounds: int, batches: tuple[int, ...] = (1, 8, 32, 128)) -> None:
    """W2: (median T(256) - median T(1)) / 255, and T(1)."""
    for batch in batches:
        times: dict[int, list[float]] = {1: [], LATENCY_TOKENS: []}
        llm.generate(equal_prompts(batch, 99), greedy(4), use_tqdm=False)
        for salt in range(rounds):
            for num_tokens, seconds in times.items():
                prompts = equal_prompts(batch, 10 * salt + num_tokens)
                llm.reset_prefix_cache()
                seconds.append(timed(lambda prompts=prompts, n=num_tokens: llm.generate(prompts, greedy(n), use_tqdm=False)))
        first, last = (statistics.median(times[n]) for n in (1, LATENCY_TOKENS))
        per_token_ms = 1000 * (last - first) / (LATENCY_TOKENS - 1)
        report.add(work="w2", batch=batch, ms_per_token=round(per_token_ms, 3), first_token_ms=round(1000 * first, 1))


def prefix(llm: LLM, report: Report, rounds: int) -> None:
    """W3: 256 prompts with 2,048 shared tokens, 64 out."""
    llm.generate(shared_prefix(8, salt=900), greedy(4), use_tqdm=False)
    for salt in range(rounds):
        prompts = shared_prefix(salt=salt)
        llm.reset_prefix_cache()
        report.add(work="w3", s=round(timed(lambda prompts=prompts: llm.generate(prompts, greedy(64), use_tqdm=False)), 3))


def long_context(llm: LLM, report: Report, rounds: int, counts: tuple[int, ...] = (1, 8)) -> None:
    """W4: 32,000 tokens in, 128 out, one and eight at once."""
    llm.generate(long_prompts(1, 999), greedy(4), use_tqdm=False)
    for count in counts:
        times: dict[int, list[float]] = {1: [], 128: []}
        for salt in range(rounds):
            for num_tokens, seconds in times.items():
                prompts = long_prompts(count, 10 * salt + num_tokens)
                llm.reset_prefix_cache()
                seconds.append(timed(lambda prompts=prompts, n=num_tokens: llm.generate(prompts, greedy(n), use_tqdm=False)))
        first, last = (statistics.median(times[n]) for n in (1, 128))
        report.add(work="w4", count=count, first_token_s=round(first, 3), ms_per_token=round(1000 * (last - first) / 127, 3))


WORK: dict[str, Callable[[LLM, Report, int], None]] = {
    "w1": throughput,
    "w2": latency,
    "w3": prefix,
    "w4": long_context,
    "w4-one": partial(long_context, counts=(1,)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--work", nargs="+", choices=WORK, default=["w1", "w2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--option", action="append", default=[], help="NAME=JSON, a setting of the engine")
    arguments = parser.parse_args()
    options = {name: json.loads(value) for name, _, value in (option.partition("=") for option in arguments.option)}
    report = Report(arguments.shape)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        model = write_shape(arguments.shape, Path(folder))
        with LLM(str(model), load_format="dummy", skip_tokenizer_init=True, **options) as llm:
            memory, seconds = llm.engine.plan.memory, time.perf_counter() - start
            report.add(work="start", s=round(seconds, 2), graphs_mib=memory.graphs_bytes >> 20, blocks=memory.num_blocks)
            for name in arguments.work:
                WORK[name](llm, report, arguments.rounds)
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in report.lines))


def _commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
