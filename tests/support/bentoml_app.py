"""Services for `bentoml serve support.bentoml_app:NAME`, without a model.

`talking` answers with the fixed text of a fake loop, byte by byte; `counting` has the real scheduler and recorder over a fake runner,
thus metrics; `attached` is two workers of the engine at ENGINE_SOCKET; `outer` depends on `talking`. FIRST_IMPORT names a module that is
imported before all others, WORKERS the number of workers of `counting`, DRAIN_TIMEOUT_S what running requests of `talking` get at SIGTERM.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import AsyncGenerator

importlib.import_module(os.environ.get("FIRST_IMPORT", "bentoml"))

import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import bentoml  # noqa: E402

from pagedcore import AsyncEngine, EngineConfig  # noqa: E402
from pagedcore.client import ModelInfo  # noqa: E402
from pagedcore.core.scheduler import Scheduler  # noqa: E402
from pagedcore.engine_build import recorder_info, scheduler_limits  # noqa: E402
from pagedcore.engine_loop import EngineLoop, EngineParts  # noqa: E402
from pagedcore.observe.recorder import Recorder  # noqa: E402
from pagedcore_adapters import bentoml_service  # noqa: E402
from support.engine_builder import make_plan  # noqa: E402
from support.fake_engine import make_fake_engine  # noqa: E402
from support.fake_runner import VOCAB_SIZE, FakeRunner  # noqa: E402


def counting_engine(config: EngineConfig) -> AsyncEngine:
    plan = make_plan(metrics_instance=config.metrics_instance)
    info = ModelInfo(model_names=("fake",), max_model_len=plan.max_model_len, created_s=0, vocab_size=VOCAB_SIZE)
    runner = FakeRunner(plan.num_blocks, plan.block_size)
    scheduler, recorder = Scheduler(scheduler_limits(plan)), Recorder(recorder_info(plan))
    return AsyncEngine(loop=EngineLoop(EngineParts(plan=plan, info=info, scheduler=scheduler, runner=runner, recorder=recorder)))


def make_engine(config: EngineConfig) -> AsyncEngine:
    """In the stead of `shared_engine`: by the model that a service names."""
    if config.model == "counting":
        return counting_engine(config)
    return make_fake_engine(Path(tempfile.mkdtemp(prefix="pagedcore-fake-")))[0]


bentoml_service.shared_engine = make_engine

talking = bentoml_service.build_service(
    {"model": "talking"}, name="talking", drain_timeout_s=float(os.environ.get("DRAIN_TIMEOUT_S", "30"))
)
counting = bentoml_service.build_service({"model": "counting"}, name="counting", workers=int(os.environ.get("WORKERS", "1")))
attached = bentoml_service.build_service(name="attached", workers=2, socket=os.environ.get("ENGINE_SOCKET", "engine.sock"))


@bentoml.service(name="outer")
class Outer:
    """Asks `talking`, which `bentoml serve` runs in a process of its own, and `--development` in this one."""

    llm: Any = bentoml.depends(talking)

    @bentoml.api
    async def shout(self, text: str) -> str:
        reply = await self.llm.generate(text, max_tokens=10, stop=["zebra"], logit_bias={5: 1.0})
        return f"{os.getpid()} {reply.text.upper()}"

    @bentoml.api
    async def shout_on(self, text: str) -> AsyncGenerator[str, None]:
        async for piece in self.llm.chat_stream([{"role": "user", "content": text}], max_tokens=10):
            yield piece.upper()


outer = Outer
