"""What seeing inside costs: W1 with everything on, with recording paused, and without the prefix cache, in turn on one GPU.

python -m bench.gpu_costs --shape qwen3-0.6b [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.gpu import Report, timed
from bench.gpu_workloads import SHAPES, mixed_lengths, write_shape
from pagedcore import LLM, SamplingParams

MEMORY_SHARES = (0.44, 0.88)
"""Of the card, until the first engine is ready, and the second: a share includes what others hold."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = Report(arguments.shape)
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_shape(arguments.shape, Path(folder)))
        with _engine(model, MEMORY_SHARES[0], caching=True) as cached, _engine(model, MEMORY_SHARES[1], caching=False) as plain:
            _compare(cached, plain, report, arguments.rounds)
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in report.lines))


def _engine(model: str, memory_share: float, caching: bool) -> LLM:
    return LLM(model, load_format="dummy", skip_tokenizer_init=True, gpu_memory_utilization=memory_share, enable_prefix_caching=caching)


def _compare(cached: LLM, plain: LLM, report: Report, rounds: int) -> None:
    """Each round runs all three, each round in another order; adds one line a run and the medians' costs in percent."""
    kinds: list[tuple[str, Callable[[], float]]] = [
        ("all_on", lambda: _run(cached)),
        ("recording_paused", lambda: _run_paused(cached)),
        ("no_prefix_cache", lambda: _run(plain)),
    ]
    seconds: dict[str, list[float]] = {name: [] for name, _ in kinds}
    for _, run in kinds:
        run()
    for number in range(rounds):
        turn = number % len(kinds)
        for name, run in kinds[turn:] + kinds[:turn]:
            seconds[name].append(run())
            report.add(work="costs", kind=name, s=round(seconds[name][-1], 3))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name in ("recording_paused", "no_prefix_cache"):
        report.add(work="costs", beside=name, cost_percent=round(100 * (medians["all_on"] / medians[name] - 1), 2))


def _run(llm: LLM) -> float:
    """Seconds of one W1 with an empty prefix cache."""
    prompts, lengths = mixed_lengths()
    params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
    llm.reset_prefix_cache()
    return timed(lambda: llm.generate(prompts, params, use_tqdm=False))


def _run_paused(llm: LLM) -> float:
    llm.engine.loop.pause_recording()
    try:
        return _run(llm)
    finally:
        llm.engine.loop.start_recording()


if __name__ == "__main__":
    main()
