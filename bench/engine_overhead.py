"""What one engine step costs in the scheduler, without a model: 256 sequences that decode, each part timed apart.

usage: python bench/engine_overhead.py [--sequences 256] [--steps 400] [--overlap]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections import defaultdict, deque

from pagedcore.core.limits import SchedulerLimits
from pagedcore.core.scheduler import Scheduler
from pagedcore.core.step import StepPlan, StepResult
from pagedcore.messages import AddRequest
from pagedcore.sampling_params import SamplingParams

TOKEN_ID = 7


def make_scheduler(num_sequences: int, num_steps: int, block_size: int, *, overlap: bool) -> Scheduler:
    """A scheduler whose sequences all decode, with prompt lengths that spread the block boundaries over the steps."""
    max_model_len = 128 + num_steps + 16
    limits = SchedulerLimits(
        block_size=block_size,
        num_blocks=num_sequences * (max_model_len // block_size + 2),
        max_model_len=max_model_len,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=max(8192, 128 * num_sequences),
        num_in_flight_steps=2 if overlap else 1,
    )
    scheduler = Scheduler(limits)
    for index in range(num_sequences):
        prompt = [index] * (64 + index % 64)
        params = SamplingParams(max_tokens=num_steps + 8, seed=0)
        name = f"request-{index}"
        stops = frozenset({2})
        scheduler.add(
            AddRequest(request_id=name, group_id=name, prompt_token_ids=prompt, params=params, arrival_s=0.0, stop_token_ids=stops), 0.0
        )
    return scheduler


def result_of(plan: StepPlan) -> StepResult:
    return StepResult(step_id=plan.step_id, sampled_token_ids=[TOKEN_ID] * sum(plan.samples))


def measure(scheduler: Scheduler, num_steps: int) -> dict[str, list[float]]:
    """Seconds of each part, one entry a step; the first steps (prefill) are left out."""
    times: dict[str, list[float]] = defaultdict(list)
    in_flight: deque[StepPlan] = deque()
    for _ in range(num_steps):
        t0 = time.perf_counter()
        plan = scheduler.schedule(t0)
        t1 = time.perf_counter()
        if plan is not None:
            in_flight.append(plan)
        if len(in_flight) < scheduler.limits.num_in_flight_steps:
            continue
        oldest = in_flight.popleft()
        result = result_of(oldest)
        t2 = time.perf_counter()
        scheduler.commit(oldest, result, t2)
        t3 = time.perf_counter()
        scheduler.take_updates()
        scheduler.take_events()
        t4 = time.perf_counter()
        for name, seconds in (("schedule", t1 - t0), ("commit", t3 - t2), ("take", t4 - t3), ("sum", t1 - t0 + t4 - t2)):
            times[name].append(seconds)
    return {name: seconds[4:] for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=256, help="running sequences")
    parser.add_argument("--steps", type=int, default=400, help="decode steps")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of one KV block")
    parser.add_argument("--overlap", action="store_true", help="plan one step ahead")
    args = parser.parse_args()
    scheduler = make_scheduler(args.sequences, args.steps, args.block_size, overlap=args.overlap)
    times = measure(scheduler, args.steps)
    print(f"{args.sequences} sequences, block_size {args.block_size}, overlap {args.overlap}, Python {platform.python_version()}")
    print(f"{'part':<10}{'median us':>12}{'p90 us':>12}{'max us':>12}")
    for name, seconds in times.items():
        deciles = statistics.quantiles(seconds, n=10)
        print(f"{name:<10}{statistics.median(seconds) * 1e6:>12.1f}{deciles[-1] * 1e6:>12.1f}{max(seconds) * 1e6:>12.1f}")


if __name__ == "__main__":
    main()
