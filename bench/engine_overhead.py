"""What one engine step costs on the engine thread, without a model: 256 sequences that decode, each part timed apart.

schedule, commit and take are the scheduler's; metrics is the recorder; emit groups the updates by outbox and hands them over;
deliver puts them into the streams of callers and wakes their event loop. What callers do with them is not part of the step.

usage: python bench/engine_overhead.py [--sequences 256] [--steps 400] [--overlap] [--freeze]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from pagedcore.client import ModelInfo
from pagedcore.core.limits import SchedulerLimits
from pagedcore.core.scheduler import Scheduler
from pagedcore.core.step import StepPlan, StepResult
from pagedcore.engine_loop import EngineLoop, EngineParts
from pagedcore.front import Front, TokenizedPrompt
from pagedcore.messages import InboxMessage
from pagedcore.observe.recorder import Recorder, RecorderInfo
from pagedcore.outboxes import Outbox
from pagedcore.request_stream import LoopWaker, RequestStream
from pagedcore.sampling_params import SamplingParams

TOKEN_ID = 7
NUM_LEFT_OUT = 4
"""The first steps are prefills."""


class Stopwatch:
    """Owns the seconds of each part, one entry a step."""

    def __init__(self) -> None:
        self.step: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time added to the part."""

        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.step[name] += time.perf_counter() - start
            return result

        return call

    def next_step(self) -> None:
        self.steps.append(self.step)
        self.step = defaultdict(float)


class SteppedLoop(EngineLoop):
    """An engine loop that has no thread and turns when it is told to."""

    def __init__(self, parts: EngineParts, watch: Stopwatch) -> None:
        super().__init__(parts)
        self._timed_emit = watch.timed("emit", super()._emit)
        self._start_recording()

    def handle(self, message: InboxMessage, outbox: Outbox) -> None:
        self._handle(message, outbox)

    def turn(self) -> None:
        self._step()

    def _emit(self) -> None:
        self._timed_emit()


class Bench:
    """An engine's parts without a device, one turn at a time."""

    def __init__(self, num_sequences: int, num_steps: int, block_size: int, *, overlap: bool) -> None:
        self.watch = Stopwatch()
        self.event_loop = asyncio.new_event_loop()
        limits = make_limits(num_sequences, num_steps, block_size, overlap=overlap)
        self.scheduler = Scheduler(limits)
        recorder = Recorder(RecorderInfo(model_name="bench", block_size=block_size, num_blocks=limits.num_blocks))
        for owner, names in ((self.scheduler, ("schedule", "commit")), (recorder, ("record", "maybe_flush"))):
            for name in names:
                setattr(owner, name, self.watch.timed("metrics" if owner is recorder else name, getattr(owner, name)))
        for name in ("take_events", "take_updates"):
            setattr(self.scheduler, name, self.watch.timed("take", getattr(self.scheduler, name)))
        info = ModelInfo(model_names=("bench",), max_model_len=limits.max_model_len, created_s=0, vocab_size=1000)
        self.front = Front(info, None, self.send)
        self.deliver = self.watch.timed("deliver", self.front.deliver)
        plan: Any = _Plan(overlap)
        parts = EngineParts(plan=plan, info=info, scheduler=self.scheduler, runner=_Runner(), recorder=recorder)
        self.loop = SteppedLoop(parts, self.watch)
        self.streams = [self.open(index, num_steps) for index in range(num_sequences)]

    def send(self, message: InboxMessage) -> None:
        self.loop.handle(message, self.deliver)

    def open(self, index: int, num_steps: int) -> RequestStream:
        """A request whose prompt length spreads the block boundaries over the steps."""
        prompt = TokenizedPrompt(text=None, token_ids=[index] * (64 + index % 64))
        params = SamplingParams(max_tokens=num_steps + 8, seed=0, ignore_eos=True, stop_token_ids=[2])
        waker = LoopWaker(self.event_loop)
        return self.front.open(prompt, params, f"request-{index}", context=None, arrival_s=time.monotonic(), waker=waker)

    def turn(self) -> None:
        """One turn of the engine's loop, then what happens on other threads, which is not timed."""
        self.loop.turn()
        self.watch.next_step()
        self.event_loop.call_soon(self.event_loop.stop)
        self.event_loop.run_forever()
        for stream in self.streams:
            stream.absorb()


class _Plan:
    def __init__(self, overlap: bool) -> None:
        self.overlap = overlap


class _Step:
    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan

    def result(self) -> StepResult:
        return StepResult(step_id=self.plan.step_id, sampled_token_ids=[TOKEN_ID] * sum(self.plan.samples))


class _Runner:
    def submit(self, plan: StepPlan) -> _Step:
        return _Step(plan)

    def close(self) -> None:
        """There is no device."""


def make_limits(num_sequences: int, num_steps: int, block_size: int, *, overlap: bool) -> SchedulerLimits:
    max_model_len = 128 + num_steps + 16
    return SchedulerLimits(
        block_size=block_size,
        num_blocks=num_sequences * (max_model_len // block_size + 2),
        max_model_len=max_model_len,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=max(8192, 128 * num_sequences),
        num_in_flight_steps=2 if overlap else 1,
    )


def measure(bench: Bench, num_steps: int) -> dict[str, list[float]]:
    """Seconds of each part, one entry a step."""
    for _ in range(num_steps):
        bench.turn()
    times: dict[str, list[float]] = defaultdict(list)
    for step in bench.watch.steps[NUM_LEFT_OUT:]:
        own = step["emit"] - step["take"] - step["metrics"] - step["deliver"]
        parts = {name: step[name] for name in ("schedule", "commit", "take", "metrics")} | {"emit": own, "deliver": step["deliver"]}
        for name, seconds in parts.items():
            times[name].append(seconds)
        times["sum"].append(sum(parts.values()))
    return times


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=256, help="running sequences")
    parser.add_argument("--steps", type=int, default=400, help="decode steps")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of one KV block")
    parser.add_argument("--overlap", action="store_true", help="plan one step ahead")
    parser.add_argument("--freeze", action="store_true", help="gc.freeze() before the first step")
    args = parser.parse_args()
    bench = Bench(args.sequences, args.steps, args.block_size, overlap=args.overlap)
    if args.freeze:
        gc.collect()
        gc.freeze()
    times = measure(bench, args.steps)
    print(f"{args.sequences} sequences, block_size {args.block_size}, overlap {args.overlap}, Python {platform.python_version()}")
    print(f"{'part':<10}{'median us':>12}{'p90 us':>12}{'max us':>12}")
    for name, seconds in times.items():
        deciles = statistics.quantiles(seconds, n=10)
        print(f"{name:<10}{statistics.median(seconds) * 1e6:>12.1f}{deciles[-1] * 1e6:>12.1f}{max(seconds) * 1e6:>12.1f}")


if __name__ == "__main__":
    main()
