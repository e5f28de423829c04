"""Tools, reasoning and structured output with the unmodified `openai` client against a real server over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from pagedcore.errors import ConfigError, InvalidRequestError
from pagedcore.openai import ServerSettings, build_app
from support.fake_client import FakeClient, Script
from support.live_server import live_server

HI: Any = [{"role": "user", "content": "What is the weather?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
HERMES = "{{ tools }}<tool_call></tool_call>"
ONE_CALL = ("Let me look.\n<tool", '_call>{"name": "get_weather", "argum', 'ents": {"city": "Pa', 'ris"}}', "\n</tool_call>")
TWO_CALLS = (*ONE_CALL, '\n<tool_call>{"name": "get_time", "arguments": {}}</tool_call>')
BROKEN = ("<tool_call>", "get_weather(Paris)", "</tool_call>")


@contextmanager
def serving(
    *pieces: str, template: str = HERMES, settings: ServerSettings | None = None, **script: Any
) -> Iterator[tuple[openai.OpenAI, FakeClient]]:
    fake = FakeClient(Script(pieces=pieces or ("Hi",), **script))
    fake.fake_text.template = template
    with live_server(build_app(fake, settings)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client, fake


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="fake-model", messages=fields.pop("messages", HI), **fields)


def grammar_of(fake: FakeClient) -> Any:
    return fake.seen[-1].params.structured_outputs


# ---- tools


def test_a_call_comes_back_with_its_arguments_and_the_text_before_it() -> None:
    with serving(*ONE_CALL) as (client, fake):
        choice = ask(client, tools=TOOLS).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "get_weather", {"city": "Paris"})
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    assert fake.fake_text.chats[0][1]["tools"] == TOOLS
    assert grammar_of(fake) is None
    assert not fake.seen[0].params.skip_special_tokens, "markers may be special tokens"


def test_parallel_calls_are_numbered_in_their_order() -> None:
    with serving(*TWO_CALLS) as (client, _):
        message = ask(client, tools=TOOLS, tool_choice="auto").choices[0].message
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("get_weather", '{"city": "Paris"}'),
        ("get_time", "{}"),
    ]
    assert len({call.id for call in message.tool_calls}) == 2


def test_a_stream_gives_id_and_name_first_and_then_pieces_of_the_arguments() -> None:
    with serving(*TWO_CALLS) as (client, _):
        chunks = list(ask(client, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(c.index, bool(c.id), c.type, c.function.name, c.function.arguments) for c in calls] == [
        (0, True, "function", "get_weather", ""),
        (0, False, None, None, '{"city": "Pa'),
        (0, False, None, None, 'ris"}'),
        (1, True, "function", "get_time", ""),
        (1, False, None, None, "{}"),
    ]
    assert "".join(delta.content or "" for delta in deltas) == "Let me look."
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("pieces", [ONE_CALL, TWO_CALLS, BROKEN, ("no call",)])
def test_the_streaming_helper_of_the_client_sees_what_a_whole_answer_has(pieces: tuple[str, ...]) -> None:
    with serving(*pieces) as (client, _):
        whole = ask(client, tools=TOOLS).choices[0]
        with client.chat.completions.stream(model="fake-model", messages=HI, tools=TOOLS) as stream:
            final = stream.get_final_completion().choices[0]
    assert (final.message.content or None) == (whole.message.content or None)
    assert final.finish_reason == whole.finish_reason
    named = [[(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []] for choice in (final, whole)]
    assert named[0] == named[1]


def test_what_is_no_call_is_content_markers_and_all() -> None:
    with serving(*BROKEN) as (client, _):
        choice = ask(client, tools=TOOLS).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("".join(BROKEN), None, "stop")


def test_without_tools_markers_are_plain_text() -> None:
    with serving(*ONE_CALL) as (client, fake):
        choices = [ask(client).choices[0], ask(client, tools=TOOLS, tool_choice="none").choices[0]]
    for choice in choices:
        assert (choice.message.content, choice.finish_reason) == ("".join(ONE_CALL), "stop")
    assert all("tools" not in kwargs for _, kwargs in fake.fake_text.chats)


def test_a_call_that_max_tokens_cuts_off_ends_with_length() -> None:
    with serving(*ONE_CALL) as (client, _):
        choice = ask(client, tools=TOOLS, max_tokens=len("".join(ONE_CALL[:3]))).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls[0].function.arguments) == ("length", '{"city": "Pa')


@pytest.mark.parametrize("ending", [{"stop": "Par"}, {}], ids=["by a stop string", "by the model"])
def test_a_call_that_is_cut_off_does_not_end_with_calls(ending: dict[str, str]) -> None:
    with serving(*(ONE_CALL if ending else ONE_CALL[:3])) as (client, _):
        choice = ask(client, tools=TOOLS, **ending).choices[0]
        chunks = list(ask(client, tools=TOOLS, stream=True, **ending))
    assert choice.message.tool_calls[0].function.arguments.startswith('{"city": "')
    assert (choice.finish_reason, chunks[-1].choices[0].finish_reason) == ("stop", "stop")


def test_a_stop_string_after_a_whole_call_ends_with_calls() -> None:
    with serving(*TWO_CALLS) as (client, _):
        choice = ask(client, tools=TOOLS, stop="\n</tool_call>").choices[0]
    assert (choice.finish_reason, len(choice.message.tool_calls)) == ("tool_calls", 1)


def test_each_choice_is_read_by_itself() -> None:
    with serving(choices=(ONE_CALL, ("Sunny.",))) as (client, _):
        whole = ask(client, tools=TOOLS, n=2).choices
        chunks = list(ask(client, tools=TOOLS, n=2, stream=True))
    assert [choice.finish_reason for choice in whole] == ["tool_calls", "stop"]
    assert [bool(choice.message.tool_calls) for choice in whole] == [True, False]
    ends = {c.index: c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason}
    assert ends == {0: "tool_calls", 1: "stop"}


def test_logprobs_of_every_token_come_beside_calls() -> None:
    with serving(*ONE_CALL) as (client, _):
        whole = ask(client, tools=TOOLS, logprobs=True).choices[0]
        chunks = list(ask(client, tools=TOOLS, logprobs=True, stream=True))
    tokens = [entry.token for entry in whole.logprobs.content]
    assert "".join(tokens) == "".join(ONE_CALL)
    streamed = [entry.token for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == tokens


def test_required_and_named_choices_force_a_call_by_a_grammar_in_the_models_form() -> None:
    with serving(*ONE_CALL) as (client, fake):
        ask(client, tools=TOOLS, tool_choice="required")
        required = grammar_of(fake)
        ask(client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_time"}})
        named = grammar_of(fake)
        ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        single = grammar_of(fake)
    assert all('"<tool_call>"' in grammar.text for grammar in (required, named, single))
    assert all(name in required.text for name in ("get_weather", "get_time"))
    assert "get_weather" not in named.text
    assert ")*" in required.text
    assert all(")*" not in grammar.text for grammar in (named, single))


def test_a_strict_tool_is_held_to_its_schema_with_choice_auto_too() -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    with serving(*ONE_CALL) as (client, fake):
        ask(client, tools=strict)
    assert "TEXT" in grammar_of(fake).text


def test_tools_beside_a_json_answer_leave_both_open() -> None:
    with serving('{"a": 1}') as (client, fake):
        answer = ask(client, tools=TOOLS, response_format={"type": "json_object"}).choices[0]
        assert "start: calls | answer" in grammar_of(fake).text
        with pytest.raises(openai.BadRequestError, match="tool_choice='auto' only"):
            ask(client, tools=TOOLS, tool_choice="required", response_format={"type": "json_object"})
        with pytest.raises(openai.BadRequestError, match="must ask for JSON"):
            ask(client, tools=TOOLS, extra_body={"structured_outputs": {"regex": "a+"}})
    assert answer.message.content == '{"a": 1}'


@pytest.mark.parametrize("template", ["{{ messages }}", "{{ tools }}"])
def test_a_model_whose_template_teaches_no_known_form_is_offered_no_tools(template: str) -> None:
    with serving(template=template) as (client, _), pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=TOOLS)
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_feature")


def test_a_setting_names_the_form_where_the_template_does_not() -> None:
    settings = ServerSettings(tool_parser="llama3")
    with serving('{"name": "get_time", "parameters": {}}', template="{{ tools }}", settings=settings) as (client, _):
        assert ask(client, tools=TOOLS).choices[0].message.tool_calls[0].function.name == "get_time"
    with pytest.raises(ConfigError, match="must be one of auto, hermes, llama3, mistral"):
        ServerSettings(tool_parser="qwen")  # type: ignore[arg-type]


FORMS: list[tuple[str, tuple[str, ...]]] = [
    (HERMES, ("<tool_call>", '{"name": "get_weather", "arguments": {"city": "Ulm"}}', "</tool_call>")),
    ("{{ tools }}<|python_tag|>", ('{"name": "get_weather", ', '"parameters": {"city": "Ulm"}}')),
    ("{{ tools }}[TOOL_CALLS]", ("[TOOL_CALLS] ", '[{"name": "get_weather", "arguments": {"city": "Ulm"}}]')),
]


@pytest.mark.parametrize(("template", "pieces"), FORMS, ids=["hermes", "llama3", "mistral"])
def test_the_chat_template_says_in_which_form_calls_are_read(template: str, pieces: tuple[str, ...]) -> None:
    with serving(*pieces, template=template) as (client, _):
        whole = ask(client, tools=TOOLS).choices[0]
        deltas = [chunk.choices[0].delta for chunk in ask(client, tools=TOOLS, stream=True)]
    (call,) = whole.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments), whole.finish_reason) == ("get_weather", {"city": "Ulm"}, "tool_calls")
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert [part.function.name for part in parts if part.id] == ["get_weather"]
    assert "".join(part.function.arguments for part in parts) == call.function.arguments


def test_calls_and_their_results_go_back_to_the_model() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    history: Any = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    with serving("Sunny.") as (client, fake):
        assert ask(client, tools=TOOLS, messages=history).choices[0].message.content == "Sunny."
    assert fake.fake_text.chats[0][0][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    ]


# ---- reasoning


def test_reasoning_comes_apart_from_the_answer_where_the_template_has_it() -> None:
    pieces = ("<thi", "nk>Rain", "? No.</think>", "\n\nSunny", ".")
    with serving(*pieces, template="{{ messages }}</think>") as (client, _):
        message = ask(client).choices[0].message
        deltas = [chunk.choices[0].delta for chunk in ask(client, stream=True)]
    assert (message.content, message.reasoning_content) == ("Sunny.", "Rain? No.")
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Rain? No."
    assert "".join(delta.content or "" for delta in deltas) == "Sunny."
    with serving(*pieces) as (client, _):
        assert ask(client).choices[0].message.content == "".join(pieces)


def test_calls_after_reasoning_are_read_and_calls_inside_it_are_not() -> None:
    pieces = ("<think><tool_call>x</think>", *ONE_CALL)
    with serving(*pieces, template=HERMES + "</think>") as (client, _):
        choice = ask(client, tools=TOOLS).choices[0]
    assert (choice.message.reasoning_content, choice.message.content) == ("<tool_call>x", "Let me look.")
    assert len(choice.message.tool_calls) == 1


THINKING = HERMES + "<think></think>"
JSON: Any = {"type": "json_object"}
NAMED: Any = {"type": "function", "function": {"name": "get_time"}}
STRICT: Any = [{"type": "function", "function": {"name": "get_time", "strict": True}}]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": JSON},
        {"extra_body": {"guided_choice": ["a", "b"]}},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": NAMED},
        {"tools": TOOLS, "response_format": JSON},
        {"tools": STRICT},
    ],
    ids=["json", "choice", "required", "named", "calls or json", "strict"],
)
@pytest.mark.parametrize(
    ("said", "markers"),
    [("Hi", ("<think>", "</think>")), ("Hi<think>\n", (None, "</think>")), ("Hi<think>\n\n</think>\n\n", (None, None))],
    ids=["neither", "opened", "closed"],
)
def test_a_form_begins_after_reasoning_that_the_prompt_leaves_to_the_model(fields: Any, said: str, markers: Any) -> None:
    """Not where the template has closed it, as it does without thinking, nor for a model that does not think."""
    messages: Any = [{"role": "user", "content": said}]
    extra = {**fields.get("extra_body", {}), "add_generation_prompt": False}
    with serving("{}", template=THINKING) as (client, fake):
        ask(client, messages=messages, **{**fields, "extra_body": extra})
    form = grammar_of(fake)
    assert (form.reasoning_start, form.reasoning_end) == markers
    with serving("{}") as (client, fake):
        ask(client, messages=messages, **{**fields, "extra_body": extra})
    plain = grammar_of(fake)
    assert (plain.reasoning_start, plain.reasoning_end) == (None, None)
    assert (plain.kind, plain.text, plain.field) == (form.kind, form.text, form.field)


def test_reasoning_before_a_form_comes_apart_from_it_whole_and_streamed() -> None:
    pieces = ("<think>\nA city", ", then.\n</th", "ink>", '\n{"a":', " 1}")
    with serving(*pieces, template=THINKING) as (client, fake):
        choice = ask(client, response_format=JSON).choices[0]
        deltas = [chunk.choices[0].delta for chunk in ask(client, response_format=JSON, stream=True)]
        cut = ask(client, response_format=JSON, max_tokens=len(pieces[0])).choices[0]
    assert (choice.message.reasoning_content, choice.message.content, choice.finish_reason) == ("A city, then.", '{"a": 1}', "stop")
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "A city, then."
    assert "".join(delta.content or "" for delta in deltas) == '{"a": 1}'
    assert (cut.message.reasoning_content, cut.message.content or "", cut.finish_reason) == ("A city", "", "length")
    assert not fake.seen[0].params.skip_special_tokens, "the end of reasoning may be a special token"


def test_a_forced_call_comes_after_reasoning_too() -> None:
    with serving("<think>Paris?</think>", "<tool", *ONE_CALL[1:], template=THINKING) as (client, _):
        choice = ask(client, tools=TOOLS, tool_choice="required").choices[0]
    assert (choice.message.reasoning_content, choice.finish_reason) == ("Paris?", "tool_calls")
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}


def test_a_caller_who_says_where_the_form_begins_is_left_alone() -> None:
    own = {"regex": "a+", "reasoning_end": "[/R]"}
    asked = {"json_object": True, "reasoning_end": "[/R]", "reasoning_start": "[R]"}
    with serving("a", template=THINKING) as (client, fake):
        ask(client, extra_body={"structured_outputs": own})
        assert (grammar_of(fake).reasoning_start, grammar_of(fake).reasoning_end) == (None, "[/R]")
        ask(client, tools=TOOLS, extra_body={"structured_outputs": asked})
        assert (grammar_of(fake).reasoning_start, grammar_of(fake).reasoning_end) == ("[R]", "[/R]")
        client.completions.create(model="fake-model", prompt="a", extra_body={"structured_outputs": own})
        assert grammar_of(fake).reasoning_end == "[/R]"


# ---- structured output


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", '{"type": "object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"b": 1, "a": 2}, "strict": True}}},
            "json",
            '{"b": 1, "a": 2}',
        ),
        ({"extra_body": {"structured_outputs": {"choice": ["a", "b"]}}}, "choice", '["a", "b"]'),
        ({"extra_body": {"structured_outputs": {"json": '{"type": "string"}'}}}, "json", '{"type": "string"}'),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "regex", "a+"),
        ({"extra_body": {"structured_outputs": {"grammar": 'root ::= "a"'}}}, "grammar", 'root ::= "a"'),
        ({"extra_body": {"guided_json": {"type": "string"}}}, "json", '{"type": "string"}'),
        ({"extra_body": {"guided_regex": "a+"}}, "regex", "a+"),
        ({"extra_body": {"guided_choice": ["a"]}}, "choice", '["a"]'),
        ({"extra_body": {"guided_grammar": 'root ::= "a"'}}, "grammar", 'root ::= "a"'),
    ],
)
def test_each_spelling_of_a_form_reaches_the_engine_from_both_routes(fields: Any, kind: str, text: str) -> None:
    with serving() as (client, fake):
        ask(client, **fields)
        extra = {**fields.get("extra_body", {}), **{name: value for name, value in fields.items() if name != "extra_body"}}
        client.completions.create(model="fake-model", prompt="a", extra_body=extra)
    for seen in fake.seen:
        params = seen.params.structured_outputs
        assert params is not None
        assert (params.kind, params.text, params.field) == (kind, text, next(iter(extra)))


def test_text_and_null_ask_for_no_form() -> None:
    with serving() as (client, fake):
        ask(client, response_format={"type": "text"}, extra_body={"guided_json": None, "structured_outputs": None})
    assert grammar_of(fake) is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object or json_schema"),
        ({"response_format": {"type": "grammar"}}, "response_format.type", "use structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "a name and a schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, "response_format.json_schema.name", "letters"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema", "JSON schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "x": 1}}},
            "response_format.json_schema.x",
            "not a field",
        ),
        ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, "response_format.schema", "not a field"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a"}}}, "response_format.json_schema", "not offered"),
        ({"response_format": {"type": "text", "strict": True}}, "response_format.strict", "not a field"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag is not offered"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs", "a text that is not empty"),
        ({"guided_json": "no json"}, "guided_json", "JSON schema"),
        ({"guided_choice": []}, "guided_choice", "list of texts"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "each ask for a form"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "end-of-sequence"),
    ],
)
def test_a_form_that_is_wrong_is_a_400_that_names_the_field(fields: Any, param: str, words: str) -> None:
    with serving() as (client, _), pytest.raises(openai.BadRequestError, match=words) as caught:
        ask(client, extra_body=fields)
    assert caught.value.param == param


def test_a_grammar_that_the_engine_refuses_is_a_400_before_a_stream_begins() -> None:
    error = InvalidRequestError("response_format cannot be followed: Invalid type: strin.", param="response_format")
    with serving(error=error, raises=True) as (client, _), pytest.raises(openai.BadRequestError, match="Invalid type") as caught:
        ask(client, stream=True, response_format={"type": "json_object"})
    assert caught.value.param == "response_format"
