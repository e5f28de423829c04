"""Where a decode step's time goes on a GPU: the device's own time, the host's time to submit, and each kernel's share.

python -m bench.gpu_step --shape qwen3-0.6b --rows 1 32 128 --context 256 [--ragged] [--kernels 12]
python -m bench.gpu_step --shape qwen2.5-7b --rows 64 160 256 --context 2144 --shared-prefix 2048   # read once, and by each row
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu_workloads import SHAPES, write_shape
from pagedcore.config import EngineConfig
from pagedcore.core.step import AdmittedRow, StepPlan
from pagedcore.runtime import shared_prefix
from pagedcore.runtime.build import build_runner
from pagedcore.runtime.model_runner import ModelRunner
from pagedcore.sampling_params import SamplingParams

STEPS = 30
MAX_PREFILL_TOKENS = 8192
BLOCK_SIZE = 16
NEVER = 1 << 60
"""Bytes that no prefix saves."""


class Decoding:
    """Owns rows that decode forever, one token a step; each begins with the same `num_shared` tokens, of whole blocks."""

    def __init__(self, runner: ModelRunner, contexts: list[int], params: SamplingParams, num_shared: int) -> None:
        self._runner = runner
        self._rows = list(range(len(contexts)))
        self._positions = contexts
        shared = num_shared // BLOCK_SIZE
        own = -(-(max(contexts) + 8 * STEPS) // BLOCK_SIZE) - shared
        admitted = [
            AdmittedRow(
                row=row,
                request_id=str(row),
                token_ids=[(i if i < num_shared else row + i) % 1000 for i in range(context)],
                num_prompt_tokens=context,
                block_ids=[*range(shared), *range(shared + row * own, shared + (row + 1) * own)],
                params=params,
            )
            for row, context in enumerate(contexts)
        ]
        self.prefill_ms: list[float] = []
        at_once = max(1, MAX_PREFILL_TOKENS // max(contexts))
        for first in range(0, len(contexts), at_once):
            rows = self._rows[first : first + at_once]
            starts = [num_shared if row else 0 for row in rows]
            counts = [contexts[row] - start for row, start in zip(rows, starts, strict=True)]
            torch.cuda.synchronize()
            start = time.perf_counter()
            self._submit(rows, counts, starts, [admitted[row] for row in rows])
            submitted = time.perf_counter()
            torch.cuda.synchronize()
            self.prefill_ms = [1000 * (submitted - start), 1000 * (time.perf_counter() - start), sum(counts)]

    def step(self) -> None:
        """Submit one step; the device may lag behind."""
        self._submit(self._rows, [1] * len(self._rows), self._positions, [])
        self._positions = [position + 1 for position in self._positions]

    def leave(self) -> None:
        plan = StepPlan(step_id=0, rows=[], num_tokens=[], start_positions=[], samples=[], released_rows=self._rows)
        self._runner.submit(plan).result()

    def _submit(self, rows: list[int], num_tokens: list[int], starts: list[int], admitted: list[AdmittedRow]) -> None:
        plan = StepPlan(
            step_id=0,
            rows=rows,
            num_tokens=num_tokens,
            start_positions=starts,
            samples=[True] * len(rows),
            admitted=admitted,
            total_num_tokens=sum(num_tokens),
        )
        self._last = self._runner.submit(plan)


def device_us(decoding: Decoding) -> float:
    """Median device time of a step while the host runs ahead."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    for event in events[:-1]:
        event.record()
        decoding.step()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(1000 * first.elapsed_time(last) for first, last in pairwise(events[5:]))


def host_us(decoding: Decoding) -> float:
    """Median time of the host to submit a step to an idle device."""
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        decoding.step()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times)


def kernel_us(decoding: Decoding, steps: int = 5) -> Counter[str]:
    """Time of each kernel in one step, by name."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            decoding.step()
        torch.cuda.synchronize()
    totals: Counter[str] = Counter()
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name[:70]] += event.device_time / steps
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--shared-prefix", type=int, default=0, help="tokens that all rows begin with, read once and then by each row")
    parser.add_argument("--ragged", action="store_true", help="lengths from 100 to twice the context instead of all alike")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--kernels", type=int, default=12)
    arguments = parser.parse_args()
    if arguments.context <= arguments.shared_prefix:
        parser.error("--context counts the shared prefix, and each row needs a token of its own")
    config = EngineConfig(load_format="dummy", max_model_len=max(4096, 2 * arguments.context + 1024), block_size=BLOCK_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        runner, _ = build_runner(config, write_shape(arguments.shape, Path(folder)))
        num_shared = arguments.shared_prefix // BLOCK_SIZE * BLOCK_SIZE
        for rows in arguments.rows:
            draw = random.Random(0)
            longest = 2 * arguments.context
            contexts = [draw.randint(max(100, num_shared + 1), longest) if arguments.ragged else arguments.context for _ in range(rows)]
            for is_once in (True, False) if num_shared else (False,):
                shared_prefix.MIN_SAVED_BYTES, shared_prefix.PADDING_ROW_BYTES = (1, 0) if is_once else (NEVER, NEVER)
                say_step(runner, contexts, arguments, num_shared, is_once=is_once)
        runner.close()


def say_step(runner: ModelRunner, contexts: list[int], arguments: argparse.Namespace, num_shared: int, *, is_once: bool) -> None:
    params = SamplingParams(temperature=arguments.temperature, seed=1)
    decoding = Decoding(runner, contexts, params, num_shared)
    submit_ms, whole_ms, tokens = decoding.prefill_ms
    print(f"prefill tokens={tokens} submit_ms={submit_ms:.1f} whole_ms={whole_ms:.1f}")
    device, host = device_us(decoding), host_us(decoding)
    prefix = f" shared={num_shared} read={'once' if is_once else 'by each'}" if num_shared else ""
    work = f"{arguments.shape} rows={len(contexts)} context={arguments.context}{prefix}"
    print(f"{work} device_us={device:.0f} host_us={host:.0f}", flush=True)
    if arguments.kernels:
        for name, total in kernel_us(decoding).most_common(arguments.kernels):
            print(f"    {total:8.1f}  {name}")
    decoding.leave()


if __name__ == "__main__":
    main()
