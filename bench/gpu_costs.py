"""What seeing inside costs: W1 with everything on, with recording paused, without the prefix cache, and without both, in turn on one GPU.

python -m bench.gpu_costs --shape qwen3-0.6b [--beside recording_paused nothing] [--rounds 5] [--json FILE]

One engine runs all kinds, so that each has the whole pool: the prefix cache is switched off between two runs, when nothing is in flight.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.gpu import Report, timed
from bench.gpu_workloads import SHAPES, mixed_lengths, write_shape
from pagedcore import LLM, SamplingParams

BESIDE = ("recording_paused", "no_prefix_cache", "nothing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--beside", nargs="+", choices=BESIDE, default=["recording_paused", "no_prefix_cache"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = Report(arguments.shape)
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_shape(arguments.shape, Path(folder)))
        with LLM(model, load_format="dummy", skip_tokenizer_init=True) as llm:
            _compare(llm, report, arguments.beside, arguments.rounds)
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in report.lines))


def _compare(llm: LLM, report: Report, beside: list[str], rounds: int) -> None:
    """Each round runs all kinds, each round in another order; adds one line a run and the medians' costs in percent."""
    runs: dict[str, Callable[[], float]] = {
        "all_on": lambda: _run(llm),
        "recording_paused": lambda: _run(llm, records=False),
        "no_prefix_cache": lambda: _run(llm, caches=False),
        "nothing": lambda: _run(llm, records=False, caches=False),
    }
    kinds = [(name, runs[name]) for name in ("all_on", *beside)]
    seconds: dict[str, list[float]] = {name: [] for name, _ in kinds}
    prompts, _ = mixed_lengths()
    llm.generate(prompts[:8], SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False), use_tqdm=False)
    for number in range(rounds):
        turn = number % len(kinds)
        for name, run in kinds[turn:] + kinds[:turn]:
            seconds[name].append(run())
            report.add(work="costs", kind=name, s=round(seconds[name][-1], 3))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name in beside:
        report.add(work="costs", beside=name, cost_percent=round(100 * (medians["all_on"] / medians[name] - 1), 2))


def _run(llm: LLM, *, records: bool = True, caches: bool = True) -> float:
    """Seconds of one W1 with an empty prefix cache, or without one."""
    prompts, lengths = mixed_lengths()
    params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
    llm.reset_prefix_cache()
    with _recording(llm, on=records), _prefix_cache(llm, on=caches):
        return timed(lambda: llm.generate(prompts, params, use_tqdm=False))


@contextmanager
def _recording(llm: LLM, *, on: bool) -> Iterator[None]:
    if on:
        yield
        return
    llm.engine.loop.pause_recording()
    try:
        yield
    finally:
        llm.engine.loop.start_recording()


@contextmanager
def _prefix_cache(llm: LLM, *, on: bool) -> Iterator[None]:
    """The cache manager alone reads this setting, anew for each request and step."""
    manager = llm.engine.loop._scheduler._state.kv  # noqa: SLF001  no user switches it while an engine lives
    limits = manager._limits  # noqa: SLF001
    manager._limits = replace(limits, enable_prefix_caching=on)  # noqa: SLF001
    try:
        yield
    finally:
        manager._limits = limits  # noqa: SLF001


if __name__ == "__main__":
    main()
