"""The body of a child process whose engine has a fake runner: `Supervised(config, module="support.fake_child")`.

What the model is called says how it behaves: see `FAILURES`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pagedcore.client import ModelInfo
from pagedcore.config import EngineConfig
from pagedcore.core.scheduler import Scheduler
from pagedcore.core.step import PendingStep, StepPlan
from pagedcore.engine_build import recorder_info, scheduler_limits
from pagedcore.engine_loop import EngineLoop, EngineParts
from pagedcore.errors import CheckpointError
from pagedcore.metrics_compat.ledgers import ledger_for
from pagedcore.observe.recorder import Recorder
from pagedcore.remote.child import main
from support.engine_builder import make_plan
from support.fake_runner import VOCAB_SIZE, FakeRunner


def _refuse() -> None:
    raise CheckpointError("model.safetensors is not there.")


def _die() -> None:
    sys.stderr.write("a device library says: no memory\n")
    os._exit(7)


def _is_first_start() -> bool:
    marker = Path(os.environ["PAGEDCORE_TEST_MARKER"])
    is_first = not marker.exists()
    marker.touch()
    return is_first


def _die_later() -> None:
    if not _is_first_start():
        _die()


def _hang_later() -> None:
    if not _is_first_start():
        Path(os.environ["PAGEDCORE_TEST_MARKER"] + "-2").touch()
        threading.Event().wait()


def _wait_later() -> None:
    if not _is_first_start():
        while not Path(os.environ["PAGEDCORE_TEST_MARKER"] + "-go").exists():
            time.sleep(0.05)


FAILURES: dict[str, Callable[[], None]] = {
    "refuses": _refuse,
    "dies": _die,
    "dies-later": _die_later,
    "hangs-later": _hang_later,
    "waits-later": _wait_later,
}


class PacedRunner(FakeRunner):
    """A step takes a while, as on a device."""

    def submit(self, plan: StepPlan) -> PendingStep:
        time.sleep(0.02)
        return super().submit(plan)


class FailingRunner(FakeRunner):
    """A device that breaks after the warm-up."""

    def submit(self, plan: StepPlan) -> PendingStep:
        if plan.step_id > 2:
            raise RuntimeError("the device is gone")
        return super().submit(plan)


LONG = {"max_model_len": 4000, "num_blocks": 600}
"""Room for requests that do not end before a test ends them."""
RUNNERS: dict[str, type[FakeRunner]] = {"slow": PacedRunner, "fails": FailingRunner}


def build(config: EngineConfig, make_recorder: Callable[..., Recorder]) -> EngineLoop:
    """An engine of a few blocks; it fails as the model's name says."""
    FAILURES.get(config.model or "", lambda: None)()
    plan = make_plan(**LONG, metrics_compat=config.metrics_compat, metrics_instance=config.metrics_instance)
    runner = RUNNERS.get(config.model or "", FakeRunner)(plan.num_blocks, plan.block_size)
    info = ModelInfo(model_names=("fake",), max_model_len=plan.max_model_len, created_s=0, vocab_size=VOCAB_SIZE)
    recorder = make_recorder(recorder_info(plan), ledger=ledger_for(config.metrics_compat))
    return EngineLoop(EngineParts(plan=plan, info=info, scheduler=Scheduler(scheduler_limits(plan)), runner=runner, recorder=recorder))


if __name__ == "__main__":
    main(build)
