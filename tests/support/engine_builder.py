"""Engines on the fake runner: real scheduler, recorder, loop and front, no model and no torch."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from pagedcore.async_engine import AsyncEngine
from pagedcore.client import ModelInfo
from pagedcore.config import EngineConfig, EnginePlan, HostTierPlan, MemoryPlan
from pagedcore.core.scheduler import Scheduler
from pagedcore.core.step import PendingStep, StepPlan, StepResult
from pagedcore.engine_build import recorder_info, scheduler_limits
from pagedcore.engine_loop import EngineLoop, EngineParts
from pagedcore.observe.recorder import Recorder
from support.fake_runner import VOCAB_SIZE, FakeRunner, next_token


@dataclass(slots=True)
class GatedRunner:
    """A fake runner whose steps wait for an open gate, and that says when one waits. Steps listed in `failing_steps` fail."""

    inner: FakeRunner
    gate: threading.Event = field(default_factory=threading.Event)
    waiting: threading.Event = field(default_factory=threading.Event)
    submit_errors: list[Exception] = field(default_factory=list)
    is_closed: bool = False

    def submit(self, plan: StepPlan) -> PendingStep:
        if self.submit_errors:
            raise self.submit_errors.pop(0)
        return _GatedStep(self, self.inner.submit(plan))

    def close(self) -> None:
        self.is_closed = True
        self.inner.close()


@dataclass(slots=True)
class _GatedStep:
    runner: GatedRunner
    pending: PendingStep

    def result(self) -> StepResult:
        self.runner.waiting.set()
        assert self.runner.gate.wait(120.0), "the test never opened the gate"
        return self.pending.result()


def make_plan(
    *, overlap: bool = False, max_model_len: int = 256, num_blocks: int = 256, num_host_blocks: int = 0, **options: Any
) -> EnginePlan:
    config = EngineConfig.from_mapping({"block_size": 8, "skip_tokenizer_init": True, "num_kv_blocks": num_blocks, **options})
    memory = MemoryPlan(
        device="fake", total_bytes=0, held_by_others_bytes=0, budget_bytes=0, weights_bytes=0, activations_bytes=0, graphs_bytes=0,
        block_bytes=1, num_blocks=num_blocks,
    )  # fmt: skip
    return EnginePlan(
        config=config, model_dir="/nowhere", tokenizer_dir="/nowhere", model_name="fake", served_model_names=("fake",), model_type="fake",
        device="fake", dtype="float32", kv_cache_dtype="float32", quantization=None, linear_backend="fake", attention_backend="fake",
        vocab_size=VOCAB_SIZE, max_model_len=max_model_len, max_num_batched_tokens=config.max_num_batched_tokens or 64,
        overlap=overlap, memory=memory,
        host_tier=HostTierPlan(num_blocks=num_host_blocks, block_bytes=1, copy_block_s=1.0, compute_block_s=2.0),
    )  # fmt: skip


@dataclass(slots=True)
class Built:
    engine: AsyncEngine
    runner: GatedRunner
    loop: EngineLoop

    def settle(self) -> None:
        """Until the engine has nothing to do and has told everybody; raises where its books disagree then."""
        while self.loop.call(lambda: self.loop._scheduler.has_work).result(60):
            pass
        self.engine.check()


def make_loop(**options: Any) -> tuple[EngineLoop, GatedRunner]:
    """An engine loop that is made and not started, its gate open."""
    from prometheus_client import CollectorRegistry

    plan = make_plan(**options)
    runner = GatedRunner(FakeRunner(plan.num_blocks, plan.block_size))
    runner.gate.set()
    info = ModelInfo(model_names=("fake",), max_model_len=plan.max_model_len, created_s=0, vocab_size=VOCAB_SIZE)
    recorder = Recorder(recorder_info(plan), registry=CollectorRegistry())
    return EngineLoop(
        EngineParts(plan=plan, info=info, scheduler=Scheduler(scheduler_limits(plan)), runner=runner, recorder=recorder)
    ), runner


def make_engine(*, gate_open: bool = True, **options: Any) -> Built:
    """An AsyncEngine that is warm. With `gate_open=False` the next step waits until the test opens the gate."""
    loop, runner = make_loop(**options)
    engine = AsyncEngine(loop=loop)
    if not gate_open:
        runner.gate.clear()
        runner.waiting.clear()
    return Built(engine, runner, loop)


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """What the fake model generates, by a naive loop."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]
