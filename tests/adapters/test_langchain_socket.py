"""LangChain models on an engine that listens at a Unix socket: `socket=` in place of an engine."""

from __future__ import annotations

import dataclasses
import pickle  # noqa: TID251 - programs of others pickle models
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from pagedcore.async_engine import AsyncEngine
from pagedcore.client import ModelInfo
from pagedcore.core.scheduler import Scheduler
from pagedcore.engine_build import recorder_info, scheduler_limits
from pagedcore.engine_loop import EngineLoop, EngineParts
from pagedcore.errors import EngineUnreachableError, ModelNotFoundError
from pagedcore.observe.recorder import Recorder
from pagedcore.remote.address import SocketPath
from pagedcore.remote.server import EngineServer
from pagedcore_adapters import shared_engine
from pagedcore_adapters.langchain_chat import ChatPagedCore, PagedCoreLLM
from pagedcore_adapters.shared_engine import close_shared_engines
from support.engine_builder import make_plan
from support.fake_engine import make_byte_tokenizer
from support.fake_runner import FakeRunner

MODELS = pytest.mark.parametrize("kind", [ChatPagedCore, PagedCoreLLM])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[AsyncEngine, str]]:
    """An engine on the fake runner that listens at a socket, and its path."""
    engine = make_engine(tmp_path)
    path = tmp_path / "e.sock"
    server = EngineServer(engine, SocketPath(path))
    yield engine, str(path)
    close_shared_engines()
    engine.close_sync()
    server.close()


def make_engine(folder: Path) -> AsyncEngine:
    """Its plan names a folder with a tokenizer, which whoever attaches loads."""
    text = make_byte_tokenizer(folder)
    plan = make_plan(num_blocks=64)
    plan = dataclasses.replace(
        plan, vocab_size=text.vocab_size, tokenizer_dir=str(folder), config=plan.config.replace(skip_tokenizer_init=False)
    )
    info = ModelInfo(model_names=("fake", "also-fake"), max_model_len=plan.max_model_len, created_s=0, vocab_size=text.vocab_size)
    recorder = Recorder(recorder_info(plan), registry=CollectorRegistry())
    runner = FakeRunner(plan.num_blocks, plan.block_size)
    parts = EngineParts(plan=plan, info=info, scheduler=Scheduler(scheduler_limits(plan)), runner=runner, recorder=recorder)
    return AsyncEngine(loop=EngineLoop(parts), text=text)


@MODELS
def test_a_model_asks_the_engine_at_the_socket(served: tuple[AsyncEngine, str], kind: Any) -> None:
    engine, path = served
    model = kind(socket=path, max_tokens=4)
    assert text_of(model.invoke("hello there")) == text_of(kind(engine=engine, max_tokens=4).invoke("hello there"))
    assert model._identifying_params["model_name"] == "fake"
    assert [(record["adapter"], record["completion_tokens"]) for record in engine.history.recent()] == [("langchain", 4)] * 2


def test_two_models_share_one_connection_and_find_each_others_prefixes(served: tuple[AsyncEngine, str]) -> None:
    _, path = served
    question = "the same question of a certain length"
    first, second = (ChatPagedCore(socket=path, max_tokens=2).invoke(question) for _ in range(2))
    assert first.usage_metadata is not None
    assert second.usage_metadata is not None
    assert first.usage_metadata["input_token_details"]["cache_read"] == 0
    assert second.usage_metadata["input_token_details"]["cache_read"] > 0
    assert list(shared_engine._attached) == [path]


@pytest.mark.asyncio
@MODELS
async def test_streams_and_batches_come_through_it(served: tuple[AsyncEngine, str], kind: Any) -> None:
    _, path = served
    model = kind(socket=path, max_tokens=5)
    whole = await model.ainvoke("hello there")
    pieces = [piece async for piece in model.astream("hello there")]
    assert "".join(map(text_of, pieces)) == text_of(whole)
    assert [text_of(reply) for reply in model.batch(["hello there"] * 3)] == [text_of(whole)] * 3


@MODELS
def test_a_pickle_holds_the_path(served: tuple[AsyncEngine, str], kind: Any) -> None:
    _, path = served
    other = pickle.loads(pickle.dumps(kind(socket=path, max_tokens=2)))
    assert other.socket == path
    assert text_of(other.invoke("a")) == text_of(kind(socket=path, max_tokens=2).invoke("a"))


@MODELS
def test_a_name_that_is_not_served_there_is_an_error(served: tuple[AsyncEngine, str], kind: Any) -> None:
    assert kind(socket=served[1], model="also-fake", max_tokens=1).invoke("a") is not None
    with pytest.raises(ModelNotFoundError, match="fake, also-fake"):
        kind(socket=served[1], model="other", max_tokens=1).invoke("a")


@MODELS
def test_without_an_engine_there_the_call_is_an_error_and_the_model_object_is_none(tmp_path: Path, kind: Any) -> None:
    model = kind(socket=str(tmp_path / "none.sock"), model="any")
    with pytest.raises(EngineUnreachableError):
        model.invoke("a")


@MODELS
@pytest.mark.parametrize("other", [{"engine_config": {}}, {"engine": object()}])
def test_a_socket_and_another_engine_contradict_each_other(kind: Any, other: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="and socket were given; give an engine, the settings of a shared one, or a socket"):
        kind(socket="/tmp/e.sock", **other)


def text_of(reply: Any) -> str:
    return reply if isinstance(reply, str) else str(reply.content)


@MODELS
def test_metrics_of_an_engine_at_a_socket_are_not_promised_here(kind: type[Any], served: tuple[AsyncEngine, str]) -> None:
    with pytest.raises(ValidationError, match="those of an engine at a socket are in its own"):
        kind(socket=served[1], metrics_port=0)
