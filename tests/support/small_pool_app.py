"""A server over an engine on the fake runner, with a pool so small that whatever the metrics tell of happens in seconds.

Run as: python small_pool_app.py PORT. A request whose id is `FAILING_ID` fails on the device.
The program itself sends requests of a class, as long as it runs. The engine says how busy its device is, as by
the driver of a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import threading

import uvicorn

from pagedcore.async_engine import AsyncEngine
from pagedcore.client import ModelInfo, RequestContext
from pagedcore.core.scheduler import Scheduler
from pagedcore.engine_build import recorder_info, scheduler_limits
from pagedcore.engine_loop import EngineLoop, EngineParts
from pagedcore.errors import RequestError
from pagedcore.metrics_compat.ledgers import VllmLedger
from pagedcore.observe.recorder import Recorder
from pagedcore.openai import ServerSettings, build_app
from pagedcore.sampling_params import SamplingParams
from support.engine_builder import make_plan
from support.fake_runner import VOCAB_SIZE, FakeRunner

FAILING_ID = "fails-on-the-device"
KEYS = {"key-of-acme": "acme", "key-of-beta": "beta"}
OPEN_KEY = "key-without-tenant"
BLOCK_SIZE = 8
MAX_MODEL_LEN = 128


def make_small_engine() -> AsyncEngine:
    """24 blocks for four rows of up to 16 blocks each, eight blocks of host memory beside them, and a queue of eight."""
    plan = make_plan(
        overlap=True, block_size=BLOCK_SIZE, num_blocks=24, max_model_len=MAX_MODEL_LEN, max_num_seqs=4, max_num_batched_tokens=32,
        max_waiting_requests=8,
    )  # fmt: skip
    info = ModelInfo(model_names=("fake",), max_model_len=MAX_MODEL_LEN, created_s=0, vocab_size=VOCAB_SIZE, max_waiting_requests=8)
    runner = FakeRunner(plan.num_blocks, plan.block_size, row_errors={FAILING_ID: "this row fails on purpose"})
    limits = dataclasses.replace(scheduler_limits(plan), num_host_blocks=8)
    scheduler, recorder = Scheduler(limits), Recorder(recorder_info(plan), ledger=VllmLedger())
    recorder.set_device_utilization(0.5)
    return AsyncEngine(loop=EngineLoop(EngineParts(plan=plan, info=info, scheduler=scheduler, runner=runner, recorder=recorder)))


def ask_under_a_class(engine: AsyncEngine, ended: threading.Event) -> None:
    """Two requests a second, of tenant acme, until `ended`."""
    for number in itertools.count():
        context = RequestContext(tenant="acme", request_class="nightly")
        with contextlib.suppress(RequestError):  # the queue is full
            list(engine.generate_sync([number % VOCAB_SIZE] * 12, SamplingParams(max_tokens=4), context=context))
        if ended.wait(0.5):
            return


if __name__ == "__main__":
    engine, ended = make_small_engine(), threading.Event()
    thread = threading.Thread(target=ask_under_a_class, args=(engine, ended))
    thread.start()
    app = build_app(engine, ServerSettings(api_keys=(OPEN_KEY,), tenants=KEYS))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", lifespan="off", ws="none")
    ended.set()
    thread.join()
    engine.close_sync()
