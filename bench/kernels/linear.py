"""Skinny products on one GPU: `python -m bench.kernels.linear [--json FILE] [--sweep] [--rows N ...] [--shapes IN-OUT ...]`.

Replays of a CUDA graph over weights that are rotated over more than 260 MB, beside torch's own product in the same process; each
product may start while the one before it ends, as in an engine's step. share = bytes of weights / time / 4.37 TB/s (what a plain read
reaches on an H200). Each configuration is compared with a float32 product before it is timed. --sweep tries a grid of
configurations and prints the three fastest.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from pagedcore_kernels.triton_ops.attention_common import card_of
from pagedcore_kernels.triton_ops.linear_settings import DotConfig, LinearConfig, RowConfig, choose_config
from pagedcore_kernels.triton_ops.row_linear import MAX_ROWS_A_TILE
from pagedcore_kernels.triton_ops.skinny_linear import skinny_linear

READ_BYTES_PER_S = 4.37e12
ROTATED_BYTES = 260e6
MAX_RELATIVE_ERROR = 1e-2
ROWS = (1, 8, 16, 32, 64)
SMALL_SHAPES = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 151936))
LARGE_SHAPES = ((4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096), (4096, 32000))
GROUPED_SHAPES = ((3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584))


@dataclass(frozen=True, slots=True)
class Result:
    """One timed configuration."""

    in_features: int
    out_features: int
    rows: int
    config: str
    us: float
    floor_us: float
    torch_us: float
    relative_error: float
    chosen: bool

    @property
    def share(self) -> float:
        return self.floor_us / self.us


class Problem:
    """A bfloat16 matrix in several copies, and how rows are multiplied with it."""

    def __init__(self, in_features: int, out_features: int) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.read_bytes = in_features * out_features * 2
        num_copies = math.ceil(ROTATED_BYTES / self.read_bytes)
        weights = torch.empty(num_copies, out_features, in_features, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
        self.copies = list(weights)

    def multiply(self, x: Tensor, copy: Tensor, config: LinearConfig, out: Tensor) -> Tensor:
        return skinny_linear(x, copy, config=config, out=out)

    def reference(self, x: Tensor) -> Tensor:
        return x.float() @ self.copies[0].float().t()

    def chosen(self, rows: int) -> LinearConfig:
        return choose_config(rows, self.out_features, self.in_features, capability=card_of(torch.device("cuda", 0)).capability)

    def candidates(self, rows: int) -> Iterator[LinearConfig]:
        num_tiles = self.out_features // 64
        if rows <= MAX_ROWS_A_TILE:
            yield from (config for config in self._row_candidates() if rows == 1 or config.holds_whole_rows(self.in_features))
        splits = [s for s in (1, 2, 4, 8) if s == 1 or (num_tiles * s <= 512 and self.in_features >= 512 * s)]
        for block_n, block_k, num_warps, num_stages in ((64, 128, 4, 4), (64, 64, 4, 6), (32, 128, 4, 4), (128, 64, 4, 4)):
            for count in splits:
                yield DotConfig(block_n, block_k, num_warps, num_stages, count, 2)
                if (block_n, block_k) == (64, 128):
                    yield DotConfig(block_n, block_k, num_warps, num_stages, count, 0)

    def _row_candidates(self) -> Iterator[RowConfig]:
        whole = triton.next_power_of_2(self.in_features)
        for num_warps in (1, 2, 4, 8):
            for elements in (512 * num_warps, 1024 * num_warps, 2048 * num_warps):
                if elements >= whole:
                    yield RowConfig(elements // whole, whole, num_warps)
        for block_n, block_k, num_warps in ((4, 2048, 4), (4, 1024, 4), (8, 1024, 4), (8, 512, 4), (2, 2048, 4), (4, 512, 2), (2, 1024, 2)):
            if block_k < whole:
                yield RowConfig(block_n, block_k, num_warps)
                if self.out_features <= 4096 and self.in_features >= 4 * block_k:
                    yield RowConfig(block_n, block_k, num_warps, 2)


@dataclass
class Report:
    """Results so far, and whether there is time for more."""

    budget_s: float
    sweep: bool
    started: float = field(default_factory=time.monotonic)
    results: list[Result] = field(default_factory=list)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def bench(self, problem: Problem, all_rows: list[int]) -> None:
        """The chosen configuration, the candidates of a sweep, and torch, for each number of rows."""
        inputs = {rows: torch.randn(rows, problem.in_features, device="cuda").bfloat16() for rows in all_rows}
        configs = {rows: self._configs(problem, rows) for rows in all_rows}
        compile_in_threads(problem, inputs, configs)
        for rows, x in inputs.items():
            expected, start = problem.reference(x), len(self.results)
            torch_us = time_replays([lambda w=w, x=x: F.linear(x, w) for w in problem.copies], problem.read_bytes)
            for config in configs[rows]:
                self._attempt(problem, x, expected, config, torch_us)
            self._say(self.results[start:])

    def _configs(self, problem: Problem, rows: int) -> list[LinearConfig]:
        return list(dict.fromkeys([problem.chosen(rows), *(problem.candidates(rows) if self.sweep else ())]))

    def _attempt(self, problem: Problem, x: Tensor, expected: Tensor, config: LinearConfig, torch_us: float) -> None:
        """A configuration that the card refuses or that errs is named and left out."""
        out = torch.full(expected.shape, float("nan"), dtype=x.dtype, device=x.device)
        name = f"{problem.in_features}->{problem.out_features} {x.shape[0]} rows {config}"
        try:
            error = relative_error(problem.multiply(x, problem.copies[0], config, out), expected)
            if not error < MAX_RELATIVE_ERROR:
                print(f"WRONG: {name}: relative error {error}")
                return
            us = time_replays([lambda c=c: problem.multiply(x, c, config, out) for c in problem.copies], problem.read_bytes)
        except (RuntimeError, triton.runtime.errors.OutOfResources) as refused:
            print(f"{name}: {str(refused).splitlines()[0][:160]}")
            return
        floor_us = problem.read_bytes / READ_BYTES_PER_S * 1e6
        sizes = (problem.in_features, problem.out_features, x.shape[0])
        self.results.append(Result(*sizes, repr(config), us, floor_us, torch_us, error, config == problem.chosen(x.shape[0])))

    def _say(self, results: list[Result]) -> None:
        best = sorted(results, key=lambda result: result.us)[:3] if self.sweep else []
        for mark, result in [("chosen", r) for r in results if r.chosen] + [("best", r) for r in best]:
            where = f"{result.in_features:5}->{result.out_features:<6} {result.rows:2} rows {mark:6}"
            times = f"{result.us:7.2f} us {result.share:5.1%} of {result.floor_us:.2f}"
            beside = f"torch {result.torch_us:6.2f}, {result.torch_us / result.us:4.2f}x"
            print(f"{where} {times}; {beside}; error {result.relative_error:.1e} {result.config}", flush=True)


def compile_in_threads(problem: Problem, inputs: dict[int, Tensor], configs: dict[int, list[LinearConfig]]) -> None:
    """Triton's passes and the assembler run outside of Python's lock. What fails here fails again, and is named, when it is timed."""
    with ThreadPoolExecutor(16) as pool:
        for rows, x in inputs.items():
            out = torch.empty(rows, problem.out_features, dtype=x.dtype, device=x.device)
            for config in configs[rows]:
                pool.submit(problem.multiply, x, problem.copies[0], config, out)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


def time_replays(calls: list[Callable[[], object]], read_bytes: int, num_replays: int = 5) -> float:
    """Median microseconds of a call, in replays of a graph of at least 1.5 ms that makes each call equally often."""
    calls[0]()
    torch.cuda.synchronize()
    estimate_us = read_bytes / READ_BYTES_PER_S * 1e6 + 2
    rounds = max(1, min(400 // len(calls), math.ceil(1500 / (estimate_us * len(calls)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(num_replays + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    return statistics.median(times[1:])


def _shape(text: str) -> tuple[int, int]:
    in_features, out_features = map(int, text.split("-"))
    return in_features, out_features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one line for each result to this file")
    parser.add_argument("--sweep", action="store_true", help="try a grid of configurations for each shape")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS), help="how many rows x has")
    parser.add_argument(
        "--shapes", nargs="*", type=_shape, default=[*SMALL_SHAPES, *LARGE_SHAPES, *GROUPED_SHAPES], help="such as 1024-4096"
    )
    parser.add_argument("--budget", type=float, default=220.0, help="seconds after which no further shape is begun")
    args = parser.parse_args()
    torch.manual_seed(0)
    report = Report(args.budget, args.sweep)
    for in_features, out_features in args.shapes:
        if report.elapsed_s > report.budget_s:
            print(f"out of time before {in_features}->{out_features}")
            continue
        problem = Problem(in_features, out_features)
        report.bench(problem, args.rows)
        del problem
        torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {report.elapsed_s:.0f} s")
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps({"device": torch.cuda.get_device_name(), **asdict(result)}) + "\n" for result in report.results)


if __name__ == "__main__":
    main()
