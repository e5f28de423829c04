"""One engine behind several doors of one process: an HTTP app as LitServe serves it, a BentoML service and a LangChain chain."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bentoml
import httpx
import pytest
from langchain_core.prompts import ChatPromptTemplate
from prometheus_client.parser import text_string_to_metric_families

from pagedcore.async_engine import AsyncEngine
from pagedcore.client import ModelInfo
from pagedcore.core.scheduler import Scheduler
from pagedcore.core.step import PendingStep, StepPlan
from pagedcore.engine_build import recorder_info, scheduler_limits
from pagedcore.engine_loop import EngineLoop, EngineParts
from pagedcore.observe.recorder import Recorder
from pagedcore.openai import ServerSettings, build_app
from pagedcore.tracing.tracer import Tracer
from pagedcore_adapters import bentoml_service
from pagedcore_adapters.langchain_chat import ChatPagedCore
from support.engine_builder import make_plan
from support.fake_engine import make_byte_tokenizer
from support.fake_runner import FakeRunner
from support.served import wait_until

BLOCK_SIZE, NUM_BLOCKS = 8, 64
QUESTION = "Which town has the tallest church?"
PROMPT = f"user: {QUESTION}\nassistant: "
CACHED = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
DOORS = ("litserve", "bentoml", "langchain")


@dataclass
class WatchedRunner:
    """A fake runner that notes how many requests each step has, and whose steps wait for an open gate."""

    inner: FakeRunner
    gate: threading.Event = field(default_factory=threading.Event)
    batch_sizes: list[int] = field(default_factory=list)

    def submit(self, plan: StepPlan) -> PendingStep:
        assert self.gate.wait(120.0), "the test never opened the gate"
        self.batch_sizes.append(len(plan.rows))
        return self.inner.submit(plan)

    def close(self) -> None:
        self.inner.close()


@dataclass
class Doors:
    """An engine on the fake runner, and what opens on it. Each door asks the same question and says how many tokens were cached."""

    engine: AsyncEngine
    runner: WatchedRunner
    litserve_app: Any
    bentoml_app: Any
    log: Path

    def ask(self, door: str) -> int:
        return asyncio.run(self.ask_by_http(door)) if door != "langchain" else self.ask_a_chain()

    async def ask_by_http(self, door: str) -> int:
        app = self.litserve_app if door == "litserve" else self.bentoml_app
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4, "user": "ada"}
            reply = await client.post("/v1/chat/completions", json=body, headers={"X-Request-Class": "quiz"})
        assert reply.status_code == 200, reply.text
        return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def ask_a_chain(self) -> int:
        chat = ChatPagedCore(engine=self.engine, max_tokens=4, model_kwargs={"request_class": "quiz", "user": "ada"})
        message = (ChatPromptTemplate.from_template("{question}") | chat).invoke({"question": QUESTION})
        assert message.usage_metadata is not None
        return int(message.usage_metadata["input_token_details"]["cache_read"])

    def num_completed(self) -> dict[tuple[str, str], float]:
        """Requests of this engine by adapter and class, as the door of LitServe shows them."""
        families = text_string_to_metric_families(asyncio.run(self._metrics()))
        samples = [sample for family in families for sample in family.samples if sample.name == "pagedcore_requests_total"]
        ours = [sample for sample in samples if sample.labels["engine"] == self.engine.config.metrics_instance and sample.value]
        return {(sample.labels["adapter"], sample.labels["class"]): sample.value for sample in ours}

    async def _metrics(self) -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=self.litserve_app), base_url="http://test") as client:
            return (await client.get("/metrics")).text

    def settle(self) -> None:
        """Until the engine has told its history of everything that has ended."""
        while self.engine.loop.call(lambda: self.engine.loop._scheduler.has_work).result(60):
            pass
        self.engine.check()


@pytest.fixture
def doors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doors]:
    runner = WatchedRunner(FakeRunner(NUM_BLOCKS, BLOCK_SIZE))
    runner.gate.set()
    engine = make_engine(tmp_path, runner)
    monkeypatch.setattr(bentoml_service, "shared_engine", lambda _: engine)
    service = bentoml_service.build_service(engine.config)
    instance = service.inner()
    monkeypatch.setattr(bentoml, "get_current_service", lambda: instance)
    app = build_app(engine, ServerSettings(adapter="litserve"))
    yield Doors(engine, runner, app, service.mount_apps[0][0], tmp_path / "log")
    engine.close_sync()


def make_engine(folder: Path, runner: WatchedRunner) -> AsyncEngine:
    """Real scheduler, pool, recorder on the process' registry, history and log; bytes as tokens.

    Other tests of this process have engines, too: on metrics this one is called as the folder is.
    """
    text = make_byte_tokenizer(folder)
    plan = make_plan(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, metrics_instance=folder.name, request_log=str(folder / "log"))
    plan = dataclasses.replace(plan, vocab_size=text.vocab_size)
    info = ModelInfo(model_names=("fake",), max_model_len=plan.max_model_len, created_s=0, vocab_size=text.vocab_size)
    recorder = Recorder(recorder_info(plan))
    scheduler, tracer = Scheduler(scheduler_limits(plan)), Tracer(recorder, plan.config)
    parts = EngineParts(plan=plan, info=info, scheduler=scheduler, runner=runner, recorder=recorder, tracer=tracer)
    return AsyncEngine(loop=EngineLoop(parts), text=text)


@pytest.mark.parametrize("first", DOORS)
def test_what_one_door_has_computed_the_others_find(doors: Doors, first: str) -> None:
    assert doors.ask(first) == 0
    assert {door: doors.ask(door) for door in DOORS} == dict.fromkeys(DOORS, CACHED)


def test_there_is_one_pool(doors: Doors) -> None:
    def num_cached() -> int:
        doors.settle()
        return doors.engine.stats().num_cached_blocks

    assert num_cached() == 0
    doors.ask("litserve")
    alone = num_cached()
    assert alone >= CACHED // BLOCK_SIZE
    for door in DOORS:
        doors.ask(door)
    assert num_cached() == alone, "the same prompt and the same answer are the same blocks"


def test_there_is_one_registry_and_every_door_counts_in_it(doors: Doors) -> None:
    for door in DOORS:
        doors.ask(door)
    doors.settle()
    assert doors.num_completed() == {(door, "quiz"): 1.0 for door in DOORS}


def test_the_request_log_says_who_asked(doors: Doors) -> None:
    for door in DOORS:
        doors.ask(door)
    doors.settle()
    assert [record["adapter"] for record in doors.engine.history.recent()] == list(reversed(DOORS))
    doors.engine.close_sync()
    lines = [json.loads(line) for line in doors.log.read_text(encoding="utf-8").splitlines()]
    assert [(line["adapter"], line["user"], line["class"], line["cached_tokens"]["pool"]) for line in lines] == [
        ("litserve", "ada", "quiz", 0),
        ("bentoml", "ada", "quiz", CACHED),
        ("langchain", "ada", "quiz", CACHED),
    ]


def test_all_doors_at_once_are_one_batch(doors: Doors) -> None:
    doors.ask("litserve")
    doors.settle()
    doors.runner.gate.clear()
    with ThreadPoolExecutor(3) as pool:
        answers = pool.map(doors.ask, DOORS)
        wait_until(lambda: doors.engine.front.num_open == 3, 60, "all three are open")
        doors.runner.gate.set()
        assert list(answers) == [CACHED] * 3
    assert max(doors.runner.batch_sizes) == 3
