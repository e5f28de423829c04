"""A whole engine over the tiny random model and a byte-level tokenizer: enough to follow grammars, in milliseconds."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from pagedcore.async_engine import AsyncEngine
from pagedcore.client import ModelInfo
from pagedcore.core.scheduler import Scheduler
from pagedcore.engine_build import recorder_info, scheduler_limits
from pagedcore.engine_loop import EngineLoop, EngineParts
from pagedcore.grammar.grammars import Grammars
from pagedcore.observe.recorder import Recorder
from pagedcore.outputs import RequestOutput
from pagedcore.runtime.model_runner import ModelRunner
from pagedcore.sampling_params import SamplingParams
from support.engine_builder import make_plan
from support.grammars import BACKEND, EOS, VOCAB_SIZE, make_grammars
from support.small_tokenizers import CHATML, load_saved
from support.tiny_model import TinyModel


@contextmanager
def grammar_engine(folder: Path, *, grammars: Grammars | None = None, device: str = "cpu", **options: Any) -> Iterator[AsyncEngine]:
    """An engine whose model has the vocabulary of `support.grammars`; `options` are those of `make_plan`. On CUDA it has graphs."""
    plan = dataclasses.replace(make_plan(**options), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
    model = TinyModel(vocab_size=VOCAB_SIZE, device=device)
    runner = ModelRunner(
        model, model.layout, num_blocks=plan.num_blocks, block_size=plan.block_size, max_num_seqs=plan.config.max_num_seqs,
        max_model_len=plan.max_model_len, dtype=torch.float32, device=device,
    )  # fmt: skip
    if device == "cuda":
        runner.capture_graphs(max_num_tokens=plan.max_num_batched_tokens)
    grammars = grammars or make_grammars()
    runner.follow_grammars(grammars)
    info = ModelInfo(
        model_names=("tiny",), max_model_len=plan.max_model_len, created_s=0, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS})
    )
    recorder = Recorder(recorder_info(plan), registry=CollectorRegistry())
    scheduler = Scheduler(scheduler_limits(plan))
    loop = EngineLoop(EngineParts(plan=plan, info=info, scheduler=scheduler, runner=runner, recorder=recorder, grammars=grammars))
    engine = AsyncEngine(loop=loop, text=load_saved(folder, BACKEND, chat_template=CHATML))
    try:
        yield engine
    finally:
        engine.close_sync()


def run_all(engine: AsyncEngine, requests: list[tuple[str, SamplingParams]]) -> list[RequestOutput]:
    """The last output of each request; all run at once, each in a thread of its own."""
    last: dict[int, RequestOutput] = {}

    def run(index: int, prompt: str, params: SamplingParams) -> None:
        for output in engine.generate_sync(prompt, params):
            last[index] = output

    with engine.loop.gathering():
        threads = [threading.Thread(target=run, args=(index, *request)) for index, request in enumerate(requests)]
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(last) == len(requests)
    return [last[index] for index in range(len(requests))]
