"""ChatPagedCore with tools, structured output and models that think: what the model is shown, what it must write, what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from pagedcore.errors import InvalidRequestError, UnsupportedFeatureError
from pagedcore_adapters.langchain_chat import ChatPagedCore, PagedCoreLLM
from support.scripted_loop import THINKING_TEMPLATE, TOOL_TEMPLATE, Script, ScriptedLoop, scripted_engine

PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOON = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
SPOKEN = f"Let me look. {PARIS}"


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"{city}: sunny"


@tool
def get_time() -> str:
    """The time."""
    return "noon"


class Pet(BaseModel):
    """A pet."""

    name: str
    legs: int


class Owner(BaseModel):
    """An owner of pets."""

    pets: list[Pet]


@contextmanager
def saying(
    folder: Path, script: Script | str, *, template: str = TOOL_TEMPLATE, **fields: Any
) -> Iterator[tuple[ChatPagedCore, ScriptedLoop]]:
    with scripted_engine(folder, script, template=template) as (engine, loop):
        yield ChatPagedCore(engine=engine, **fields), loop


def prompt_of(loop: ScriptedLoop) -> str:
    return loop.text.decode(loop.requests[-1].prompt_token_ids)


def form_of(loop: ScriptedLoop) -> Any:
    return loop.requests[-1].params.structured_outputs


def joined(chunks: list[Any]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert isinstance(whole, AIMessageChunk)
    return whole


def called(message: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    return [(call["name"], call["args"]) for call in message.tool_calls]


# ---- calls


def test_a_call_that_the_model_chooses_comes_back_with_the_text_before_it(tmp_path: Path) -> None:
    with saying(tmp_path, SPOKEN) as (chat, loop):
        reply = chat.bind_tools([get_weather, get_time]).invoke("hi")
    assert (reply.content, called(reply)) == ("Let me look.", [("get_weather", {"city": "Paris"})])
    assert reply.response_metadata["finish_reason"] == "tool_calls"
    assert '"name": "get_weather"' in prompt_of(loop)
    assert "Weather of a city." in prompt_of(loop)
    assert form_of(loop) is None, "nothing is forced"
    assert not loop.requests[-1].params.skip_special_tokens, "markers may be special tokens"


@pytest.mark.parametrize("tokens_per_step", [1, 30, 1000])
def test_a_stream_gives_name_and_id_once_and_its_pieces_join_to_the_whole_answer(tmp_path: Path, tokens_per_step: int) -> None:
    with saying(tmp_path, f"{SPOKEN}\n{NOON}") as (chat, loop):
        loop.tokens_per_step = tokens_per_step
        model = chat.bind_tools([get_weather, get_time])
        chunks = list(model.stream("hi"))
        reply = model.invoke("hi")
    pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert [piece["name"] for piece in pieces if piece["name"]] == ["get_weather", "get_time"]
    assert len({piece["id"] for piece in pieces if piece["id"]}) == 2
    whole = joined(chunks)
    assert (whole.content, called(whole)) == (reply.content, called(reply))
    assert [call["args"] for call in whole.tool_call_chunks] == ['{"city": "Paris"}', "{}"]
    assert whole.response_metadata["finish_reason"] == reply.response_metadata["finish_reason"] == "tool_calls"
    assert [chunk.chunk_position for chunk in chunks][-1] == "last"
    assert [chunk.usage_metadata is not None for chunk in chunks].count(True) == 1


@pytest.mark.asyncio
async def test_native_async_reads_calls_too(tmp_path: Path) -> None:
    with saying(tmp_path, PARIS) as (chat, _):
        model = chat.bind_tools([get_weather])
        assert called(await model.ainvoke("hi")) == [("get_weather", {"city": "Paris"})]
        assert called(joined([chunk async for chunk in model.astream("hi")])) == [("get_weather", {"city": "Paris"})]


@pytest.mark.parametrize("choice", ["any", "required", True])
def test_a_required_call_is_any_of_the_tools_and_nothing_else(tmp_path: Path, choice: Any) -> None:
    with saying(tmp_path, NOON) as (chat, loop):
        assert called(chat.bind_tools([get_weather, get_time], tool_choice=choice).invoke("hi")) == [("get_time", {})]
    assert form_of(loop).text.startswith("start: calls\n")
    assert all(name in form_of(loop).text for name in ("get_weather", "get_time"))


@pytest.mark.parametrize("choice", ["get_weather", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_named_tool_is_the_only_one(tmp_path: Path, choice: Any) -> None:
    with saying(tmp_path, PARIS) as (chat, loop):
        assert called(chat.bind_tools([get_weather, get_time], tool_choice=choice).invoke("hi")) == [("get_weather", {"city": "Paris"})]
    assert "get_time" not in form_of(loop).text


@pytest.mark.parametrize("choice", [None, False, "auto"])
def test_without_a_choice_the_answer_may_be_text(tmp_path: Path, choice: Any) -> None:
    with saying(tmp_path, "No need.") as (chat, loop):
        reply = chat.bind_tools([get_weather], tool_choice=choice).invoke("hi")
    assert (reply.content, reply.tool_calls, reply.response_metadata["finish_reason"]) == ("No need.", [], "stop")
    assert form_of(loop) is None


def test_with_none_no_tool_is_shown_and_no_call_is_read(tmp_path: Path) -> None:
    with saying(tmp_path, PARIS) as (chat, loop):
        reply = chat.bind_tools([get_weather], tool_choice="none").invoke("hi")
    assert (reply.content, reply.tool_calls) == (PARIS, [])
    assert "tools:" not in prompt_of(loop)


def test_without_parallel_calls_there_is_one(tmp_path: Path) -> None:
    with saying(tmp_path, f"{PARIS}\n{NOON}") as (chat, _):
        both = chat.bind_tools([get_weather, get_time]).invoke("hi")
        one = chat.bind_tools([get_weather, get_time], parallel_tool_calls=False).invoke("hi")
    assert (len(both.tool_calls), len(one.tool_calls)) == (2, 1)


def test_a_strict_tool_is_followed_where_the_model_chooses(tmp_path: Path) -> None:
    with saying(tmp_path, SPOKEN) as (chat, loop):
        chat.bind_tools([get_weather], strict=True).invoke("hi")
    assert form_of(loop).kind == "grammar"


def test_a_call_that_was_cut_off_is_an_invalid_one(tmp_path: Path) -> None:
    with saying(tmp_path, PARIS) as (chat, loop):
        num_tokens = len(loop.text.encode(PARIS.partition('is"')[0], add_special_tokens=False))
        reply = chat.bind_tools([get_weather], max_tokens=num_tokens).invoke("hi")
    assert (reply.tool_calls, reply.response_metadata["finish_reason"]) == ([], "length")
    assert [(call["name"], call["args"]) for call in reply.invalid_tool_calls] == [("get_weather", '{"city": "Par')]


def test_each_of_several_choices_has_its_own_calls(tmp_path: Path) -> None:
    with saying(tmp_path, PARIS, n=2) as (chat, _):
        result = chat.bind_tools([get_weather]).bound.generate([[HumanMessage("hi")]], tools=chat.bind_tools([get_weather]).kwargs["tools"])  # type: ignore[attr-defined]
    assert [called(generation.message) for generation in result.generations[0]] == [[("get_weather", {"city": "Paris"})]] * 2


# ---- conversations that hold calls


def test_calls_and_their_results_reach_the_template(tmp_path: Path) -> None:
    history = [
        SystemMessage("help"),
        HumanMessage("weather?"),
        AIMessage(
            "Looking.",
            tool_calls=[{"name": "get_weather", "args": {"city": "Köln"}, "id": "c1"}],
            invalid_tool_calls=[{"name": "get_time", "args": "{", "id": "c2", "error": None}],
        ),
        ToolMessage([{"type": "text", "text": "sunny"}], tool_call_id="c1"),
        ToolMessage("not JSON", tool_call_id="c2", status="error"),
    ]
    with saying(tmp_path, "Sunny.") as (chat, loop):
        chat.invoke(history)
    assert prompt_of(loop) == (
        "system: help\nuser: weather?\n"
        'assistant: Looking.[get_weather {"city": "Köln"} c1][get_time "{" c2]\n'
        "tool: sunny for c1\ntool: not JSON for c2\nassistant: "
    )


def test_blocks_that_repeat_calls_or_hold_reasoning_are_no_text(tmp_path: Path) -> None:
    call: Any = {"type": "tool_call", "name": "get_time", "args": {}, "id": "c1"}
    blocks: Any = [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "Now:"}, call]
    with saying(tmp_path, "Noon.") as (chat, loop):
        chat.invoke([HumanMessage("time?"), AIMessage(content_blocks=blocks), ToolMessage("noon", tool_call_id="c1")])
    assert "assistant: (hm) Now:[get_time {} c1]\ntool: noon for c1\n" in prompt_of(loop)


def test_an_agents_loop_hands_back_what_it_got(tmp_path: Path) -> None:
    def script(prompt: str) -> str:
        return "It is sunny." if "tool: Paris: sunny" in prompt else PARIS

    with saying(tmp_path, script, output_version="v1") as (chat, _):
        model = chat.bind_tools([get_weather])
        messages: list[Any] = [HumanMessage("weather?"), model.invoke("weather?")]
        messages += [get_weather.invoke(call) for call in messages[-1].tool_calls]
        assert model.invoke(messages).text == "It is sunny."


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (HumanMessage([{"type": "image_url", "image_url": {"url": "http://x"}}]), "image_url"),
        (AIMessage([{"type": "tool_use", "id": "unknown", "name": "f", "input": {}}]), "tool_use"),
        (HumanMessage([{"type": "reasoning", "reasoning": "hm"}]), "reasoning"),
    ],
)
def test_what_no_template_can_show_is_refused(tmp_path: Path, message: Any, named: str) -> None:
    with saying(tmp_path, "Hi") as (chat, loop), pytest.raises(UnsupportedFeatureError, match=named):
        chat.invoke([message])
    assert loop.requests == []


# ---- structured output

PET = '{"name": "Rex", "legs": 4}'


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_a_class_comes_back_as_its_object_by_each_method(tmp_path: Path, method: Any) -> None:
    answer = f'<tool_call>\n{{"name": "Pet", "arguments": {PET}}}\n</tool_call>' if method == "function_calling" else PET
    with saying(tmp_path, answer) as (chat, loop):
        assert chat.with_structured_output(Pet, method=method).invoke("hi") == Pet(name="Rex", legs=4)
        assert chat.with_structured_output(Pet.model_json_schema(), method=method).invoke("hi") == json.loads(PET)
    kinds = {"json_schema": "json", "json_mode": "json_object", "function_calling": "grammar"}
    assert form_of(loop).kind == kinds[method]


def test_the_schema_is_the_default_and_nothing_beside_it_is_made_up(tmp_path: Path) -> None:
    with saying(tmp_path, '{"pets": []}') as (chat, loop):
        chat.with_structured_output(Owner).invoke("hi")
    schema = json.loads(form_of(loop).text)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["pets"]["items"]["additionalProperties"] is False
    assert "additionalProperties" not in schema["properties"]["pets"]


def test_a_schema_that_says_what_else_it_holds_is_left_as_it_is(tmp_path: Path) -> None:
    schema = {"title": "Scores", "description": "d", "type": "object", "properties": {}, "additionalProperties": {"type": "integer"}}
    with saying(tmp_path, '{"ann": 3}') as (chat, loop):
        assert chat.with_structured_output(schema).invoke("hi") == {"ann": 3}
    assert json.loads(form_of(loop).text)["additionalProperties"] == {"type": "integer"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_include_raw_gives_the_message_and_makes_the_parsers_error_a_value(tmp_path: Path, method: Any) -> None:
    answer = f'<tool_call>\n{{"name": "Pet", "arguments": {PET}}}\n</tool_call>' if method == "function_calling" else PET
    with saying(tmp_path, answer) as (chat, _):
        right = chat.with_structured_output(Pet, include_raw=True, method=method).invoke("hi")
        cut_off = chat.with_structured_output(Pet, include_raw=True, method=method, max_tokens=len(answer) // 2).invoke("hi")
    assert (right["parsed"], right["parsing_error"]) == (Pet(name="Rex", legs=4), None)
    assert right["raw"].usage_metadata["output_tokens"] == len(answer) + 1
    assert cut_off["parsed"] is None
    assert cut_off["raw"].response_metadata["finish_reason"] == "length"
    if method == "json_schema":
        assert isinstance(cut_off["parsing_error"], OutputParserException)


def test_a_parsed_answer_streams_as_it_grows(tmp_path: Path) -> None:
    with saying(tmp_path, PET) as (chat, _):
        seen = list(chat.with_structured_output(Pet.model_json_schema()).stream("hi"))
    assert seen[-1] == json.loads(PET)
    names = [one.get("name", "") for one in seen]
    assert all(after.startswith(before) for before, after in pairwise(names))
    assert len(seen) > 1, "a part comes before the whole; how many depends on how fast the reader is"


def test_an_unknown_method_is_refused(tmp_path: Path) -> None:
    with saying(tmp_path, "Hi") as (chat, _), pytest.raises(InvalidRequestError, match="json_schema, function_calling, json_mode"):
        chat.with_structured_output(Pet, method="xml")  # type: ignore[arg-type]


def test_response_format_is_taken_by_both_models(tmp_path: Path) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "pet", "schema": Pet.model_json_schema()}}
    with saying(tmp_path, PET) as (chat, loop):
        assert chat.bind(response_format=asked).invoke("hi").content == PET
        assert PagedCoreLLM(engine=chat.engine).invoke("hi", response_format=asked) == PET
    assert [request.params.structured_outputs.kind for request in loop.requests] == ["json", "json"]  # type: ignore[union-attr]


def test_calls_or_json_where_tools_are_offered_beside_a_form(tmp_path: Path) -> None:
    with saying(tmp_path, PET) as (chat, _):
        model = chat.bind_tools([get_weather], response_format={"type": "json_object"})
        assert json.loads(model.invoke("hi").text) == json.loads(PET)


# ---- models that think


def test_reasoning_is_beside_the_content_whole_and_streamed(tmp_path: Path) -> None:
    with saying(tmp_path, f"<think>\nWell, well.\n</think>\n\n{SPOKEN}", template=THINKING_TEMPLATE) as (chat, loop):
        model = chat.bind_tools([get_weather])
        reply, whole = model.invoke("hi"), joined(list(model.stream("hi")))
        chat.invoke([HumanMessage("hi"), AIMessage("Yes.", additional_kwargs={"reasoning_content": "hm"}), HumanMessage("so?")])
    for message in (reply, whole):
        assert message.additional_kwargs == {"reasoning_content": "Well, well."}
        assert (message.content, called(message)) == ("Let me look.", [("get_weather", {"city": "Paris"})])
        assert [block["type"] for block in message.content_blocks] == ["reasoning", "text", "tool_call"]
    assert "assistant: (hm) Yes." in prompt_of(loop)


TELLING = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
"""What a template writes where it is told not to think."""


def take_broken(loop: ScriptedLoop) -> list[str]:
    """The answers that their grammar would not have let through."""
    broken, loop.broken_grammars = loop.broken_grammars, []
    return broken


@pytest.mark.parametrize("opens", [False, True], ids=["by the model", "by the template"])
def test_an_object_and_a_forced_call_come_after_reasoning_and_follow_their_forms(tmp_path: Path, opens: bool) -> None:
    template = THINKING_TEMPLATE + ("<think>" if opens else "")
    thought = ("" if opens else "<think>") + "A {dog}?</think>"
    with saying(tmp_path, thought + PET, template=template) as (chat, _):
        found = chat.with_structured_output(Pet, include_raw=True).invoke("hi")
        streamed = list(chat.with_structured_output(Pet).stream("hi"))
    assert found["parsed"] == streamed[-1] == Pet(name="Rex", legs=4)
    assert found["raw"].additional_kwargs == {"reasoning_content": "A {dog}?"}
    with saying(tmp_path, thought + PARIS, template=template) as (chat, _):
        reply = chat.bind_tools([get_weather], tool_choice="any").invoke("hi")
    assert called(reply) == [("get_weather", {"city": "Paris"})]


def test_what_comes_after_reasoning_is_held_to_its_form_and_so_is_an_answer_without_one(tmp_path: Path) -> None:
    with saying(tmp_path, "<think>hm</think>no pet", template=THINKING_TEMPLATE) as (chat, loop):
        chat.with_structured_output(Pet, include_raw=True).invoke("hi")
        assert take_broken(loop) == ["<think>hm</think>no pet"]
    with saying(tmp_path, PET, template=THINKING_TEMPLATE) as (chat, _):
        assert chat.with_structured_output(Pet).invoke("hi") == Pet(name="Rex", legs=4)
    with saying(tmp_path, f"<think>hm</think>{PET}", template=THINKING_TEMPLATE + TELLING) as (chat, loop):
        chat.bind(chat_template_kwargs={"enable_thinking": False}, response_format={"type": "json_object"}).invoke("hi")
        assert len(take_broken(loop)) == 1, "told not to think, it has to begin with its form"


def test_arguments_of_the_template_reach_it(tmp_path: Path) -> None:
    with saying(tmp_path, "Hi", template=TOOL_TEMPLATE + "{{ mood }}") as (chat, loop):
        chat.invoke("hi", chat_template_kwargs={"mood": "cheerful"})
        assert prompt_of(loop).endswith("cheerful")
        with pytest.raises(InvalidRequestError, match="tools"):
            chat.invoke("hi", chat_template_kwargs={"tools": []})
        with pytest.raises(InvalidRequestError, match="mapping"):
            chat.invoke("hi", chat_template_kwargs=3)


# ---- what is refused


def test_a_model_that_is_taught_no_tools_cannot_be_offered_any_unless_its_form_is_told(tmp_path: Path) -> None:
    other = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with saying(tmp_path, PARIS, template=other) as (chat, _):
        with pytest.raises(UnsupportedFeatureError, match="tool_parser"):
            chat.bind_tools([get_weather]).invoke("hi")
        told = ChatPagedCore(engine=chat.engine, tool_parser="hermes")
        assert called(told.bind_tools([get_weather]).invoke("hi")) == [("get_weather", {"city": "Paris"})]


def test_tools_that_cannot_be_used_are_refused_by_name(tmp_path: Path) -> None:
    with saying(tmp_path, "Hi") as (chat, loop):
        with pytest.raises(InvalidRequestError, match="tool_choice is 'sometimes'"):
            chat.bind_tools([get_weather], tool_choice="sometimes").invoke("hi")
        with pytest.raises(InvalidRequestError, match="needs tools"):
            chat.bind_tools([], tool_choice="any").invoke("hi")
        with pytest.raises(UnsupportedFeatureError, match="use ChatPagedCore"):
            PagedCoreLLM(engine=chat.engine).invoke("hi", tools=[])
    assert loop.requests == []
