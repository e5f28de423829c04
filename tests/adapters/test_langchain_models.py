"""ChatPagedCore and PagedCoreLLM over an engine without a model: what LangChain is told, and what the engine is asked."""

from __future__ import annotations

import asyncio
import copy
import pickle  # noqa: TID251 - programs of others pickle models
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, AIMessageChunk, ChatMessage, FunctionMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from pydantic import ValidationError

from pagedcore import AsyncEngine, EngineConfig
from pagedcore.errors import ConfigError, EngineClosedError, InvalidRequestError, ModelNotFoundError, UnsupportedFeatureError
from pagedcore_adapters.langchain_chat import ChatPagedCore, PagedCoreLLM
from support.fake_engine import ANSWER, FakeLoop, make_fake_engine
from support.scripted_loop import scripted_engine

Fake = tuple[AsyncEngine, FakeLoop]
LONG_ANSWER = (ANSWER * 10)[:300]
MODELS = pytest.mark.parametrize("kind", [ChatPagedCore, PagedCoreLLM])


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    engine, loop = make_fake_engine(tmp_path)
    yield engine, loop
    engine.close_sync()


@pytest.fixture
def fake_64(tmp_path: Path) -> Iterator[Fake]:
    """Makes its first step when 64 requests run at once, and never before."""
    engine, loop = make_fake_engine(tmp_path, gather=64)
    yield engine, loop
    engine.close_sync()


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.chunks: list[Any] = []

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, **kwargs: Any) -> None:
        self.pieces.append(token)
        self.chunks.append(chunk)


def prompt_text(loop: FakeLoop, index: int = -1) -> str:
    return loop.text.decode(loop.requests[index].prompt_token_ids)


# ---- one call


def test_a_reply_carries_usage_with_cached_tokens_and_metadata(fake: Fake) -> None:
    engine, loop = fake
    reply = ChatPagedCore(engine=engine, max_tokens=5).invoke("hello")
    num_prompt = len(loop.requests[0].prompt_token_ids)
    assert reply.content == ANSWER[:5]
    assert reply.usage_metadata == {
        "input_tokens": num_prompt,
        "output_tokens": 5,
        "total_tokens": num_prompt + 5,
        "input_token_details": {"cache_read": 4},
    }
    assert reply.response_metadata == {
        "model_name": "fake",
        "model_provider": "pagedcore",
        "finish_reason": "length",
        "stop_reason": None,
        "request_id": loop.requests[0].group_id,
    }


def test_messages_go_through_the_chat_template_and_special_tokens_are_not_added_twice(fake: Fake) -> None:
    engine, loop = fake
    messages = [
        SystemMessage("be brief"),
        HumanMessage([{"type": "text", "text": "one "}, "two"]),
        AIMessage("three"),
        HumanMessage("four"),
    ]
    ChatPagedCore(engine=engine, max_tokens=1).invoke(messages)
    assert prompt_text(loop) == "system: be brief\nuser: one two\nassistant: three\nuser: four\nassistant: "


def test_a_text_model_takes_the_prompt_as_it_is(fake: Fake) -> None:
    engine, loop = fake
    assert PagedCoreLLM(engine=engine, max_tokens=4).invoke("Once upon") == ANSWER[:4]
    assert prompt_text(loop) == "Once upon"


@MODELS
def test_settings_reach_the_engine_and_a_call_overrides_them(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    engine, loop = fake
    model = kind(engine=engine, max_tokens=2, temperature=0.5, top_p=0.9, top_k=7, seed=3, model_kwargs={"min_p": 0.1, "tenant": "blue"})
    model.invoke("a", temperature=0, priority=5)
    request = loop.requests[0]
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.seed, params.min_p) == (2, 0, 0.9, 7, 3, 0.1)
    assert (request.tenant, request.priority, request.adapter) == ("blue", 5, "langchain")


def test_without_max_tokens_a_chat_goes_on_until_the_model_stops_and_a_completion_to_its_default(fake: Fake) -> None:
    engine, loop = fake
    ChatPagedCore(engine=engine, stop=["France"]).invoke("a")
    PagedCoreLLM(engine=engine, stop=["France"]).invoke("a")
    assert [request.params.max_tokens for request in loop.requests] == [None, 256]


@MODELS
def test_a_stop_string_ends_the_text_and_is_not_part_of_it(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    engine, _loop = fake
    for model, options in [(kind(engine=engine, stop=["France"]), {}), (kind(engine=engine), {"stop": ["France"]})]:
        result = model.generate_prompt([ChatPromptTemplate.from_template("hi").invoke({})], **options)
        generation = result.generations[0][0]
        assert generation.text == "The capital of "
        assert generation.generation_info is not None
        assert generation.generation_info["finish_reason"] == "stop"


@MODELS
def test_a_calls_own_stop_replaces_the_models(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    engine, loop = fake
    model = kind(engine=engine, stop=["own"], max_tokens=1)
    model.invoke("a")
    model.invoke("a", stop=["calls"])
    model.invoke("a", stop=[])
    model.bind(stop=["bound"]).invoke("a")
    assert [request.params.stop for request in loop.requests] == [("own",), ("calls",), (), ("bound",)]


@MODELS
def test_n_gives_that_many_generations(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    engine, loop = fake
    result = kind(engine=engine, n=3, max_tokens=2).generate_prompt([ChatPromptTemplate.from_template("hi").invoke({})])
    assert [generation.text for generation in result.generations[0]] == [ANSWER[:2]] * 3
    assert {request.group_id for request in loop.requests} == {loop.requests[0].request_id}


@pytest.mark.asyncio
@MODELS
async def test_native_async_equals_sync(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    engine, _loop = fake
    model = kind(engine=engine, max_tokens=20)
    reply = await model.ainvoke("hello")
    assert (reply.content if isinstance(reply, AIMessage) else reply) == ANSWER[:20]


def test_one_model_serves_several_event_loops_one_after_another(fake: Fake) -> None:
    model = ChatPagedCore(engine=fake[0], max_tokens=3)
    assert [asyncio.run(model.ainvoke("a")).content for _ in range(3)] == [ANSWER[:3]] * 3


def test_token_counts_come_from_the_models_own_tokenizer(fake: Fake) -> None:
    assert ChatPagedCore(engine=fake[0]).get_num_tokens("12345678") == 8


# ---- streams


def test_a_stream_has_many_chunks_usage_once_and_the_last_one_marked(fake: Fake) -> None:
    chunks = list(ChatPagedCore(engine=fake[0], max_tokens=300).stream("hello"))
    assert len([chunk for chunk in chunks if chunk.content]) > 1  # how many depends on how busy the machine is
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert isinstance(whole, AIMessageChunk)
    assert whole.content == LONG_ANSWER
    assert [chunk.usage_metadata is not None for chunk in chunks].count(True) == 1
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 300
    assert [chunk.chunk_position for chunk in chunks if chunk.chunk_position] == ["last"]
    assert whole.response_metadata["finish_reason"] == "length"


@MODELS
def test_a_callback_hears_each_piece_with_its_chunk(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    tokens = Tokens()
    list(kind(engine=fake[0], max_tokens=300).stream("hello", config={"callbacks": [tokens]}))
    assert len(tokens.pieces) > 1
    assert "".join(tokens.pieces) == LONG_ANSWER
    assert all(chunk is not None for chunk in tokens.chunks)


@pytest.mark.asyncio
@MODELS
async def test_an_async_stream_joins_to_the_whole(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    pieces = [piece async for piece in kind(engine=fake[0], max_tokens=30).astream("hello")]
    assert "".join(str(p.content) if isinstance(p, AIMessageChunk) else p for p in pieces) == ANSWER[:30]


@MODELS
def test_a_stream_that_is_closed_early_is_aborted(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    engine, loop = fake
    stream = kind(engine=engine, max_tokens=100_000_000).stream("hello")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert loop.wait_until(lambda: loop.num_running == 0)
    assert loop.aborted == [loop.requests[0].request_id]


@pytest.mark.asyncio
@MODELS
async def test_an_async_stream_that_is_left_early_is_aborted(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    engine, loop = fake
    async for _ in kind(engine=engine, max_tokens=100_000_000).astream("hello"):
        break
    await until(loop, lambda: loop.num_running == 0)
    assert loop.aborted == [loop.requests[0].request_id]


@pytest.mark.asyncio
@MODELS
async def test_a_cancelled_call_is_aborted(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    engine, loop = fake
    task = asyncio.create_task(kind(engine=engine, max_tokens=100_000_000).ainvoke("hello"))
    await until(loop, lambda: loop.num_running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(loop, lambda: loop.num_running == 0)
    assert loop.aborted == [loop.requests[0].request_id]


@pytest.mark.asyncio
async def test_a_stream_has_one_choice(fake: Fake) -> None:
    for model in (ChatPagedCore(engine=fake[0], n=2), PagedCoreLLM(engine=fake[0], n=2)):
        with pytest.raises(UnsupportedFeatureError, match="n is 2"):
            list(model.stream("a"))
        with pytest.raises(UnsupportedFeatureError, match="n is 2"):
            await anext(model.astream("a"))


async def until(loop: FakeLoop, condition: Callable[[], bool]) -> None:
    assert await asyncio.to_thread(loop.wait_until, condition)


# ---- batches


@MODELS
def test_a_batch_of_64_is_one_engine_batch(fake_64: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    engine, loop = fake_64
    replies = kind(engine=engine, max_tokens=3).batch([f"question {i}" for i in range(64)])
    assert len(replies) == 64
    assert loop.batch_sizes[0] == 64


@pytest.mark.asyncio
@MODELS
async def test_an_async_batch_of_64_is_one_engine_batch(fake_64: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    engine, loop = fake_64
    await kind(engine=engine, max_tokens=3).abatch([f"question {i}" for i in range(64)])
    assert loop.batch_sizes[0] == 64


def test_a_batch_through_a_chain_and_generate_are_one_engine_batch_too(fake_64: Fake) -> None:
    engine, loop = fake_64
    chat = ChatPagedCore(engine=engine, max_tokens=3)
    chain = ChatPromptTemplate.from_template("about {topic}") | chat
    chain.batch([{"topic": str(i)} for i in range(64)])
    loop.gather = 64
    result = chat.generate([[HumanMessage(str(i))] for i in range(64)])
    assert len(result.generations) == 64
    assert result.run is not None
    assert len(result.run) == 64
    assert loop.batch_sizes.count(64) >= 2


@pytest.mark.asyncio
@MODELS
async def test_max_concurrency_is_kept(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    engine, loop = fake
    model = kind(engine=engine, max_tokens=6)
    replies = model.batch(["a"] * 9, {"max_concurrency": 2})
    replies += await model.abatch(["a"] * 9, {"max_concurrency": 2})
    assert len(replies) == 18
    assert max(loop.batch_sizes) <= 2


@pytest.mark.asyncio
@MODELS
async def test_under_max_concurrency_the_next_begins_when_one_ends(tmp_path: Path, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    long = "x" * 500
    beside_the_long_one: list[bool] = []

    def script(prompt: str) -> str:
        beside_the_long_one.append(loop.is_saying(long))
        return long if "long" in prompt else "x"

    questions = ["long", *["short"] * 5]
    with scripted_engine(tmp_path, script) as (engine, loop):
        model = kind(engine=engine, max_tokens=None)
        model.batch(questions, {"max_concurrency": 2})
        await model.abatch(questions, {"max_concurrency": 2})
    assert len(beside_the_long_one) == 12
    assert any(beside_the_long_one[2:6])
    assert any(beside_the_long_one[8:])


@pytest.mark.asyncio
async def test_in_a_batch_an_exception_is_that_of_its_own_input(fake: Fake) -> None:
    model = PagedCoreLLM(engine=fake[0], max_tokens=3)
    bad = "\ud800"  # no text: half a surrogate pair
    for replies in (model.batch(["a", bad], return_exceptions=True), await model.abatch(["a", bad], return_exceptions=True)):
        assert replies[0] == ANSWER[:3]
        assert isinstance(replies[1], InvalidRequestError)


@MODELS
def test_an_empty_batch_is_empty(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    assert kind(engine=fake[0]).batch([]) == []


@MODELS
def test_a_batch_as_it_is_completed_is_one_engine_batch(fake_64: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    engine, loop = fake_64
    replies = list(kind(engine=engine, max_tokens=3).batch_as_completed([f"question {i}" for i in range(64)]))
    assert sorted(index for index, _ in replies) == list(range(64))
    assert {getattr(reply, "content", reply) for _, reply in replies} == {ANSWER[:3]}
    assert loop.batch_sizes[0] == 64


@MODELS
def test_leaving_a_batch_as_it_is_completed_ends_the_rest(tmp_path: Path, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    with scripted_engine(tmp_path, lambda prompt: "x" if "short" in prompt else "x" * 10**5) as (engine, loop):
        loop.gather = 3
        replies = kind(engine=engine, max_tokens=None).batch_as_completed(["long", "short", "long"])
        index, reply = next(replies)
        assert (index, getattr(reply, "content", reply)) == (1, "x")
        replies.close()  # type: ignore[attr-defined]
        assert loop.wait_until(lambda: loop.num_running == 0)
        assert len(loop.aborted) == 2


@MODELS
def test_in_a_batch_as_it_is_completed_exceptions_may_be_answers(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    model = kind(engine=fake[0], max_tokens=3)
    replies = dict(model.batch_as_completed(["a", "\ud800"], return_exceptions=True))
    assert getattr(replies[0], "content", replies[0]) == ANSWER[:3]
    assert isinstance(replies[1], InvalidRequestError)
    with pytest.raises(InvalidRequestError):
        list(model.batch_as_completed(["\ud800", "\ud800"]))
    assert list(model.batch_as_completed([])) == []


@MODELS
def test_the_first_failure_of_a_batch_ends_the_other_requests(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    engine, loop = fake
    with pytest.raises(InvalidRequestError):
        kind(engine=engine, max_tokens=10**9).batch(["a", "\ud800", "b"])
    assert loop.wait_until(lambda: loop.num_running == 0)


# ---- what is refused


@MODELS
def test_what_is_not_offered_is_refused_by_name(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    for option in ("functions", "function_call", "logprobs", "prompt_logprobs"):
        with pytest.raises(UnsupportedFeatureError, match=option):
            kind(engine=fake[0]).invoke("a", **{option: 1})


def test_a_role_that_no_template_has_and_a_message_that_is_no_message_are_refused(fake: Fake) -> None:
    with pytest.raises(InvalidRequestError, match="role is 'critic'"):
        ChatPagedCore(engine=fake[0]).invoke([ChatMessage("a", role="critic")])
    with pytest.raises(UnsupportedFeatureError, match="'function'"):
        ChatPagedCore(engine=fake[0]).invoke([FunctionMessage("a", name="f")])
    assert fake[1].requests == []


@MODELS
def test_an_unknown_option_is_an_error_and_not_ignored(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    with pytest.raises(ValidationError, match="max_retries"):
        kind(engine=fake[0], max_retries=2)
    with pytest.raises(InvalidRequestError, match="'beam_width'"):
        kind(engine=fake[0]).invoke("a", beam_width=4)
    with pytest.raises(ValidationError, match="beam_width"):
        kind(engine=fake[0], model_kwargs={"beam_width": 4})


@MODELS
def test_a_bad_value_is_refused_when_the_model_object_is_made(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    with pytest.raises(ValidationError, match="temperature"):
        kind(engine=fake[0], temperature=-1)


@MODELS
def test_a_name_that_the_engine_does_not_serve_is_an_error_naming_the_served_ones(
    fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]
) -> None:
    assert kind(engine=fake[0], model="also-fake", max_tokens=1).invoke("a") is not None
    with pytest.raises(ModelNotFoundError, match="fake, also-fake"):
        kind(engine=fake[0], model="other").invoke("a")
    with pytest.raises(ModelNotFoundError, match="fake, also-fake"):
        kind(engine=fake[0]).invoke("a", model="other")


def test_an_engine_and_settings_for_another_one_contradict_each_other(fake: Fake) -> None:
    with pytest.raises((ConfigError, ValidationError), match="engine_config"):
        ChatPagedCore(engine=fake[0], engine_config={"block_size": 32})


@MODELS
def test_a_closed_engine_is_an_error_and_not_an_empty_reply(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    fake[0].close_sync()
    with pytest.raises(EngineClosedError):
        kind(engine=fake[0]).invoke("a")


# ---- the object


def test_the_engine_is_neither_shown_nor_serialized(fake: Fake) -> None:
    chat = ChatPagedCore(engine=fake[0], temperature=0.0)
    assert "engine" not in repr(chat)
    assert "engine" not in chat.model_dump()
    assert chat.bind(stop=["x"]).bound.engine is fake[0]  # type: ignore[attr-defined]


@MODELS
def test_copies_share_the_engine_they_were_given(fake: Fake, kind: type[ChatPagedCore] | type[PagedCoreLLM]) -> None:
    model = kind(engine=fake[0], max_tokens=1)
    for other in (copy.copy(model), copy.deepcopy(model), model.model_copy(), model.with_config(tags=["a"]).bound):  # type: ignore[attr-defined]
        assert other.engine is fake[0]
    assert copy.deepcopy({"a": [model]})["a"][0].engine is fake[0]
    with pytest.raises(ConfigError, match="engine_config"):
        pickle.dumps(model)


@MODELS
def test_a_pickle_and_its_model_share_one_engine(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, kind: type[ChatPagedCore] | type[PagedCoreLLM]
) -> None:
    asked: list[EngineConfig] = []

    def shared(config: EngineConfig) -> AsyncEngine:
        asked.append(config)
        return fake[0]

    monkeypatch.setattr("pagedcore_adapters._langchain_model.shared_engine", shared)
    model = kind(engine_config={"block_size": 32}, model="a-model", max_tokens=2)
    other = pickle.loads(pickle.dumps(model))
    assert other == model
    assert other.invoke("a") is not None
    model.invoke("a")
    assert asked[0] == asked[1] == EngineConfig(model="a-model", block_size=32)


def test_traces_name_provider_model_and_sampling(fake: Fake) -> None:
    params = ChatPagedCore(engine=fake[0], temperature=0.5, max_tokens=7, stop=["x"])._get_ls_params()
    assert (params["ls_provider"], params["ls_model_name"], params["ls_temperature"], params["ls_max_tokens"], params["ls_stop"]) == (
        "pagedcore",
        "fake",
        0.5,
        7,
        ["x"],
    )


@MODELS
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "SmolLM2-135M-Instruct"),
        ({"model": "/models/other"}, "/models/other"),
        ({"model": "/models/other", "served_model_name": "mine"}, "mine"),
        ({"served_model_name": ("mine", "yours")}, "mine"),
    ],
)
def test_the_name_of_a_shared_engine_is_the_one_of_its_settings(kind: Any, settings: dict[str, Any], name: str) -> None:
    model = kind(engine_config=settings)
    assert model.served_name() == name
    assert model._get_ls_params()["ls_model_name"] == name


@MODELS
@pytest.mark.parametrize("settings", [{"model": "/models/other"}, {"chat_template": "{{ messages[0].content }}"}, {"dtype": "float16"}])
def test_a_cached_answer_is_never_given_for_an_engine_of_other_settings(
    fake: Fake, kind: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedcore_adapters._langchain_model.shared_engine", lambda config: fake[0])
    cache = InMemoryCache()
    models = [kind(engine_config=settings, cache=cache, max_tokens=1), kind(cache=cache, max_tokens=1)]
    for model in [*models, *models]:
        model.invoke("a")
    assert len(fake[1].requests) == 2


def test_no_prompts_are_no_answers(fake: Fake) -> None:
    assert PagedCoreLLM(engine=fake[0]).generate([]).generations == []


def test_stats_are_the_engines(fake: Fake) -> None:
    assert ChatPagedCore(engine=fake[0]).stats().num_running == 0
