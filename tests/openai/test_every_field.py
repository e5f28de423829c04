"""Every field of the two bodies that ask for tokens, sent by the unmodified `openai` client, and where it arrives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import openai
import pytest

from pagedcore.openai import build_app
from pagedcore.openai.bodies import ChatBody, CompletionBody
from support.fake_client import FakeClient, SeenRequest
from support.live_server import live_server

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "go")]
GO = {"type": "function", "function": {"name": "go"}}

SAMPLING = {
    "max_tokens": 9, "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.25, "seed": 7, "min_tokens": 2, "stop": ["x", "yz"],
    "stop_token_ids": [3], "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False, "bad_words": ["oh"],
    "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "prompt_logprobs": 1,
}  # fmt: skip
"""Arrive in the sampling parameters as they are."""
FORMS = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["a", "b"]},
    "guided_json": SCHEMA,
    "guided_regex": "[ab]",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
}
"""Arrive as what the text must follow, under the name that errors will have."""

Seen = Callable[[SeenRequest], object]
ARRIVES: dict[str, tuple[object, Seen, object]] = {
    "max_completion_tokens": (9, lambda seen: seen.params.max_tokens, 9),
    "logit_bias": ({"3": -1.5}, lambda seen: seen.params.logit_bias, {3: -1.5}),
    "cache_salt": ("s", lambda seen: seen.context.cache_salt, "s"),
    "priority": (-3, lambda seen: seen.context.priority, -3),
    "user": ("ada", lambda seen: seen.context.user, "ada"),
    "safety_identifier": ("ada", lambda seen: seen.context.user, "ada"),
    "request_id": ("mine", lambda seen: seen.request_id, "mine"),
    "add_special_tokens": (False, lambda seen: seen.prompt_token_ids, list(b"hi")),
}
"""What is sent, where it arrives, and as what."""
SHOWS: dict[str, tuple[object, Callable[[Any], object]]] = {
    "return_token_ids": (True, lambda reply: reply.choices[0].model_extra["token_ids"] == list(b"Hello world")),
    "cache_report": (True, lambda reply: "tokens" in reply.model_extra["cache"]),
}
"""What is sent, and what the reply must say then."""
NOTES = {"prompt_cache_key": "k", "metadata": {"run": "7"}}
"""Taken from every client; nothing depends on them."""
STREAM = {"stream", "stream_options"}
PROMPT = {"model", "prompt", "messages"}
COMMON = {*SAMPLING, *FORMS, *ARRIVES, *SHOWS, *NOTES, *STREAM, "best_of"}
OF_CHATS = {
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
}


@pytest.fixture(scope="module")
def served() -> Any:
    fake = FakeClient()
    with live_server(build_app(fake)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client, fake


@pytest.fixture
def ask(served: Any) -> Any:
    """Sends a completion with these fields: the reply, and what the engine saw."""
    client, fake = served

    def ask(route: str = "completion", **fields: Any) -> tuple[Any, SeenRequest]:
        create = client.completions.create if route == "completion" else client.chat.completions.create
        fields = {"prompt": "hi", **fields} if route == "completion" else {"messages": [{"role": "user", "content": "hi"}], **fields}
        known = inspect.signature(create).parameters
        own = {name: value for name, value in fields.items() if name not in known}
        reply = create(model="fake-model", extra_body=own, **{name: value for name, value in fields.items() if name in known})
        return reply, fake.seen[-1]

    return ask


def test_no_field_is_missing_here() -> None:
    assert set(CompletionBody.model_fields) == COMMON | PROMPT - {"messages"} | {"echo", "logprobs"}
    assert set(ChatBody.model_fields) == COMMON | PROMPT - {"prompt"} | OF_CHATS | {"logprobs"}


@pytest.mark.parametrize("route", ["completion", "chat"])
@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_parameter_arrives_as_it_was_sent(ask: Any, route: str, name: str) -> None:
    _, seen = ask(route, **{name: SAMPLING[name]})
    arrived = getattr(seen.params, name)
    assert (list(arrived) if isinstance(arrived, tuple) else arrived) == SAMPLING[name]


@pytest.mark.parametrize("route", ["completion", "chat"])
@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_what_the_text_must_follow(ask: Any, route: str, name: str) -> None:
    _, seen = ask(route, **{name: FORMS[name]})
    assert seen.params.structured_outputs is not None
    assert seen.params.structured_outputs.field == name


@pytest.mark.parametrize("name", ARRIVES)
def test_a_field_arrives_where_it_belongs(ask: Any, name: str) -> None:
    value, where, expected = ARRIVES[name]
    assert where(ask()[1]) != expected, "it would be so without the field"
    assert where(ask(**{name: value})[1]) == expected


@pytest.mark.parametrize("name", SHOWS)
def test_a_field_shows_in_the_reply(ask: Any, name: str) -> None:
    value, is_shown = SHOWS[name]
    assert is_shown(ask(**{name: value})[0])


@pytest.mark.parametrize("name", NOTES)
def test_a_note_of_the_callers_is_taken_and_changes_nothing(ask: Any, name: str) -> None:
    with_note, seen = ask("chat", **{name: NOTES[name]})
    without, other = ask("chat")
    assert with_note.choices == without.choices
    assert (seen.prompt_token_ids, seen.params, seen.context) == (other.prompt_token_ids, other.params, other.context)


def test_a_stream_comes_in_chunks_and_as_its_options_say(ask: Any) -> None:
    plain = list(ask("chat", stream=True)[0])
    counted = list(ask("chat", stream=True, stream_options={"include_usage": True})[0])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in plain) == "Hello world"
    assert [chunk.usage is not None for chunk in counted] == [*[False] * len(plain), True]


@pytest.mark.parametrize(
    ("name", "value", "problem"), [("best_of", 2, "best_of=2 is not offered"), ("suffix", "z", "suffix='z' is not offered")]
)
def test_what_is_not_offered_is_refused_by_name(ask: Any, name: str, value: object, problem: str) -> None:
    with pytest.raises(openai.BadRequestError, match=problem) as caught:
        ask(**{name: value})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_feature")


def test_best_of_all_choices_is_no_choice(ask: Any) -> None:
    assert ask(best_of=2, n=2)[1].params.n == 2


def test_an_echo_and_logprobs_of_a_completion(ask: Any) -> None:
    reply, seen = ask(echo=True, logprobs=2)
    assert reply.choices[0].text == "hiHello world"
    assert (seen.params.logprobs, seen.params.prompt_logprobs) == (2, 2)
    assert len(reply.choices[0].logprobs.tokens) == len(seen.prompt_token_ids) + len("Hello world")


def test_the_fields_of_a_chat(ask: Any, served: Any) -> None:
    _, fake = served
    _, seen = ask("chat", logprobs=True, top_logprobs=3)
    assert seen.params.logprobs == 3
    ask("chat", add_generation_prompt=False, chat_template_kwargs={"enable_thinking": False})
    assert fake.fake_text.chats[-1][1] == {"add_generation_prompt": False, "enable_thinking": False}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hel"}]
    _, seen = ask("chat", messages=messages, continue_final_message=True)
    assert bytes(seen.prompt_token_ids).endswith(b"<assistant>Hel")


def test_the_fields_of_tools(ask: Any, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, fake = served
    monkeypatch.setattr(fake.fake_text, "template", "{% if tools %}<tool_call>{% endif %}{{ messages }}")
    assert ask("chat", tools=TOOLS)[1].params.structured_outputs is None
    forced = ask("chat", tools=TOOLS, tool_choice="required")[1].params.structured_outputs
    named = ask("chat", tools=TOOLS, tool_choice=GO)[1].params.structured_outputs
    single = ask("chat", tools=TOOLS, tool_choice="required", parallel_tool_calls=False)[1].params.structured_outputs
    assert len({str(one) for one in (forced, named, single)}) == 3
    assert "look" in str(forced)
    assert "look" not in str(named)
