"""What observation costs the engine thread: microseconds of `Recorder.record` a step, and of one export.

python bench/observe_overhead.py [--rows 256] [--steps 2000]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="running requests, one token each a step")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--multiprocess", action="store_true", help="export to a PROMETHEUS_MULTIPROC_DIR")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if arguments.multiprocess:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = directory
        _report(arguments.rows, arguments.steps)


def _report(rows: int, steps: int) -> None:
    from pagedcore.observe.recorder import FLUSH_INTERVAL_S, Recorder, RecorderInfo

    recorder = Recorder(RecorderInfo(model_name="bench", num_blocks=4096), clock=lambda: 0.0)
    decode = _time_steps(recorder, rows, steps, lambda step, _: 0.01 + step * 1e-6)
    print(f"record, {rows} decode rows, equal gaps:      median {decode:7.1f} us")
    uneven = _time_steps(recorder, rows, steps, lambda step, row: 0.01 + row * 1e-5 + step * 1e-7)
    print(f"record, {rows} decode rows, all gaps differ: median {uneven:7.1f} us")
    print(f"record, one admission of 64 missed blocks:   median {_time_admissions(recorder, steps):7.1f} us")
    export = _time_exports(recorder, rows, steps)
    print(f"export after a decode step:                  median {export:7.1f} us, at most every {1000 * FLUSH_INTERVAL_S:.0f} ms")
    recorder.close()


def _time_steps(recorder: object, rows: int, steps: int, gap: Callable[[int, int], float]) -> float:
    from pagedcore.core.events import StepEvents

    times = []
    for number in range(steps):
        batch = StepEvents(
            now_s=0.0,  # time stands still: no export is part of this figure
            step_id=number,
            submitted_s=-0.01,
            num_tokens=rows,
            num_sequences=rows,
            num_generated_tokens=rows,
            inter_token_gaps_s=[gap(number, row) for row in range(rows)],
            num_fresh_acquisitions=rows // 16,
            num_running=rows,
            num_active_blocks=rows,
        )
        start = time.perf_counter()
        recorder.record(batch)  # type: ignore[attr-defined]
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _time_admissions(recorder: object, steps: int) -> float:
    from pagedcore.core.events import Admitted, Arrived, StepEvents
    from pagedcore.core.lookup import BlockHash, LookupReport
    from pagedcore.messages import AddRequest
    from pagedcore.sampling_params import SamplingParams

    params, times = SamplingParams(seed=0), []
    for number in range(steps):
        name = f"r{number}"
        lookup = LookupReport(
            num_prompt_tokens=1025,
            block_size=16,
            num_eligible_blocks=64,
            num_resident_blocks=0,
            live_blocks=0,
            pool_blocks=0,
            caching_disabled=False,
            missed=tuple((BlockHash((number * 64 + i).to_bytes(32, "little")), False, False) for i in range(64)),
        )
        request = AddRequest(request_id=name, group_id=name, prompt_token_ids=[0] * 1025, params=params, arrival_s=0.0)
        batch = StepEvents(now_s=0.0, events=[Arrived(request, 0.0), Admitted(name, 0.0, lookup)], num_running=1)
        start = time.perf_counter()
        recorder.record(batch)  # type: ignore[attr-defined]
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _time_exports(recorder: object, rows: int, steps: int) -> float:
    times = []
    for _ in range(min(steps, 500)):
        _time_steps(recorder, rows, 1, lambda _, row: 0.01 + row % 7 * 0.003)
        start = time.perf_counter()
        recorder.flush()  # type: ignore[attr-defined]
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    main()
