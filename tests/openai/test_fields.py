"""Fields that clients send, one test each, with the unmodified `openai` client. What generates and calls tools has files of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from pagedcore.errors import ConfigError
from pagedcore.openai import ServerSettings, build_app
from support.fake_client import FakeClient, Script
from support.live_server import live_server

HI: Any = [{"role": "user", "content": "hi"}]


@contextmanager
def serving(*scripts: Script, settings: ServerSettings | None = None, **options: Any) -> Iterator[tuple[openai.OpenAI, FakeClient]]:
    fake = FakeClient(*scripts, **options)
    with live_server(build_app(fake, settings)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client, fake


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="fake-model", messages=fields.pop("messages", HI), **fields)


# ---- the prompt


@pytest.mark.parametrize(("given", "adds"), [(None, True), (False, False), (True, True)])
def test_add_generation_prompt_reaches_the_template(given: bool | None, adds: bool) -> None:
    with serving() as (client, fake):
        ask(client, extra_body={"add_generation_prompt": given})
    assert fake.fake_text.chats[0][1]["add_generation_prompt"] is adds


def test_continue_final_message_leaves_the_last_message_open_and_the_answer_goes_on() -> None:
    messages = [*HI, {"role": "assistant", "content": "Hel"}]
    with serving(Script(pieces=("lo",))) as (client, fake):
        choice = ask(client, messages=messages, extra_body={"continue_final_message": True}).choices[0]
    assert choice.message.content == "lo"
    assert fake.fake_text.chats[0][1] == {"add_generation_prompt": False, "continue_final_message": True}
    assert bytes(fake.seen[0].prompt_token_ids) == b"<user>hi<assistant>Hel"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_the_name_of_a_message_reaches_the_template(role: str) -> None:
    with serving() as (client, fake):
        ask(client, messages=[{"role": role, "name": "ada", "content": "x"}, *HI])
    assert fake.fake_text.chats[0][0][0] == {"role": {"developer": "system"}.get(role, role), "name": "ada", "content": "x"}


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_text_parts_are_taken_from_every_role(role: str) -> None:
    extra = {"tool_call_id": "c"} if role == "tool" else {}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    with serving() as (client, fake):
        ask(client, messages=[{"role": role, "content": parts, **extra}, *HI])
    assert fake.fake_text.chats[0][0][0]["content"] == "a\nb"


def test_a_picture_is_refused_by_the_place_where_it_stands() -> None:
    content = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    with serving() as (client, _), pytest.raises(openai.BadRequestError, match="text parts only") as caught:
        ask(client, messages=[{"role": "user", "content": content}])
    assert (caught.value.param, caught.value.code) == ("messages[0].content[1].type", "unsupported_feature")


# ---- completions


def test_suffix_is_refused_unless_it_is_empty() -> None:
    with serving() as (client, _):
        assert client.completions.create(model="fake-model", prompt="a", suffix="").choices[0].text == "Hello world"
        with pytest.raises(openai.BadRequestError, match="suffix='}' is not offered") as caught:
            client.completions.create(model="fake-model", prompt="a", suffix="}")
    assert (caught.value.param, caught.value.code) == ("suffix", "unsupported_feature")


def test_best_of_is_refused_unless_it_equals_n() -> None:
    with serving() as (client, _):
        assert len(client.completions.create(model="fake-model", prompt="a", n=2, best_of=2).choices) == 2
        with pytest.raises(openai.BadRequestError, match="best_of=4 is not offered by this server unless it equals n=2") as caught:
            client.completions.create(model="fake-model", prompt="a", n=2, best_of=4)
    assert (caught.value.param, caught.value.code) == ("best_of", "unsupported_feature")


@pytest.mark.parametrize(("prompt", "echoed"), [("ab", "abHello world"), ([97, 98], "abHello world"), (["a", "b"], "aHello world")])
def test_echo_repeats_text_and_token_ids(prompt: Any, echoed: str) -> None:
    with serving() as (client, _):
        assert client.completions.create(model="fake-model", prompt=prompt, echo=True).choices[0].text == echoed


def test_logit_bias_reaches_the_engine_from_both_routes() -> None:
    with serving() as (client, fake):
        ask(client, logit_bias={"7": -100, "8": 2})
        client.completions.create(model="fake-model", prompt="a", logit_bias={"7": -100, "8": 2})
    assert [seen.params.logit_bias for seen in fake.seen] == [{7: -100.0, 8: 2.0}] * 2


# ---- usage, and the cache


STREAMED_ONLY: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"extra_body": {"cache_report": True}}, False),
    ({"stream_options": {"include_usage": False}}, False),
    ({"stream_options": {"include_usage": True}}, True),
    ({"stream_options": {"include_usage": True}, "extra_body": {"cache_report": True}}, True),
]


@pytest.mark.parametrize(("fields", "has_usage"), STREAMED_ONLY)
def test_a_stream_has_usage_only_when_it_is_asked_for(fields: dict[str, Any], has_usage: bool) -> None:
    with serving() as (client, _):
        chunks = list(ask(client, stream=True, **fields))
        chunks += list(client.completions.create(model="fake-model", prompt="a", stream=True, **fields))
    assert any("usage" in chunk.model_fields_set for chunk in chunks) is has_usage
    assert any(chunk.choices == [] for chunk in chunks) is has_usage


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"continuous_usage_stats": True}])
def test_the_cache_report_of_a_stream_is_in_the_chunk_that_ends_the_last_choice(options: dict[str, bool]) -> None:
    script = Script(choices=(("a", "b", "c"), ("x",)), num_cached_tokens=3)
    with serving(script) as (client, _):
        chunks = list(ask(client, n=2, stream=True, stream_options=options, extra_body={"cache_report": True}))
        whole = ask(client, n=2, extra_body={"cache_report": True})
    (index,) = [index for index, chunk in enumerate(chunks) if "cache" in chunk.model_extra]
    assert [choice.finish_reason for choice in chunks[index].choices] == ["stop"]
    assert all(chunk.choices == [] for chunk in chunks[index + 1 :])
    assert chunks[index].model_extra["cache"] == whole.model_extra["cache"]
    assert whole.model_extra["cache"]["tokens"]["pool"] == 3


def test_continuous_usage_counts_up_in_every_chunk_of_a_chat() -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    with serving(Script(pieces=("ab", "c"))) as (client, _):
        chunks = list(ask(client, stream=True, stream_options=options))
    prompt = len("<user>hi<assistant>")
    counts = [(c.usage.prompt_tokens, c.usage.completion_tokens, c.usage.total_tokens) for c in chunks]
    assert counts == [(prompt, n, prompt + n) for n in (0, 2, 3, 3)]


# ---- who asks, and with what


def test_user_is_logged_and_is_no_tenant(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as (client, fake), caplog.at_level("INFO", logger="pagedcore.openai"):
        ask(client, user="mallory")
        ask(client, safety_identifier="trudy")
        ask(client, user="mallory", safety_identifier="trudy")
        ask(client, user="m" * 1_000_000)
        ask(client)
    assert "user 'mallory'" in caplog.text
    contexts = [seen.context for seen in fake.seen]
    assert [context.user for context in contexts] == ["mallory", "trudy", "mallory", "m" * 126 + "..." + "m" * 127, None]
    assert {context.tenant for context in contexts} == {None}


def test_a_header_names_the_class_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as (client, fake), caplog.at_level("INFO", logger="pagedcore.openai"):
        ask(client, extra_headers={"X-Request-Class": "nightly batch"})
        ask(client)
        for wrong in ("x" * 65, "tab\there"):
            with pytest.raises(openai.BadRequestError, match="1 to 64 printable") as caught:
                ask(client, extra_headers={"X-Request-Class": wrong})
            assert caught.value.param == "X-Request-Class"
    assert [seen.context.request_class for seen in fake.seen] == ["nightly batch", None]
    assert "class 'nightly batch'" in caplog.text


def test_the_hosts_own_code_may_name_the_tenant() -> None:
    settings = ServerSettings(tenants={"any": "by key"}, tenant_of=lambda request: request.headers.get("X-Team"))
    with serving(settings=settings) as (client, fake):
        ask(client, extra_headers={"X-Team": "blue"})
        with pytest.raises(openai.AuthenticationError):
            ask(client.with_options(api_key="wrong"), extra_headers={"X-Team": "blue"})
    assert [seen.context.tenant for seen in fake.seen] == ["blue"]


def test_a_field_that_the_server_does_not_know_is_refused() -> None:
    with serving() as (client, _), pytest.raises(openai.BadRequestError, match="top_a is not a field") as caught:
        ask(client, extra_body={"top_a": 0.2})
    assert (caught.value.param, caught.value.code) == ("top_a", "unknown_field")


def test_ignored_fields_are_left_out_and_named_in_the_reply_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    settings = ServerSettings(ignored_fields=("top_a", "reasoning_effort", "store"))
    with serving(settings=settings) as (client, _), caplog.at_level("INFO", logger="pagedcore.openai"):
        create = client.chat.completions.with_raw_response.create
        for stream in (False, True):
            reply = create(model="fake-model", messages=HI, stream=stream, reasoning_effort="high", store=None, extra_body={"top_a": 1})
            assert reply.headers["X-Ignored-Fields"] == "top_a, reasoning_effort"
            reply.http_response.close()
        assert "X-Ignored-Fields" not in create(model="fake-model", messages=HI).headers
        with pytest.raises(openai.BadRequestError, match="verbosity"):
            ask(client, verbosity="low")
    assert caplog.text.count("top_a, reasoning_effort left out") == 2


@pytest.mark.parametrize("name", ["temperature", "messages", "prompt", "user"])
def test_a_field_that_is_obeyed_cannot_be_ignored(name: str) -> None:
    with pytest.raises(ConfigError, match=f"ignored_fields holds {name}, which this server obeys"):
        ServerSettings(ignored_fields=("store", name))


# ---- the rest of what clients call


def test_embeddings_are_a_404_that_says_why() -> None:
    with serving() as (client, _), pytest.raises(openai.NotFoundError, match="makes no embeddings") as caught:
        client.embeddings.create(model="fake-model", input="a")
    assert (caught.value.type, caught.value.code) == ("invalid_request_error", "unknown_url")


def test_models_are_listed_under_every_served_name_with_their_length() -> None:
    with serving(model_names=("main", "org/alias"), max_model_len=1234) as (client, _):
        listed = [(model.id, model.model_extra["max_model_len"], model.model_extra["root"]) for model in client.models.list()]  # type: ignore[index]
        reply = client.completions.create(model="org/alias", prompt="a")
    assert listed == [("main", 1234, "main"), ("org/alias", 1234, "main")]
    assert reply.model == "org/alias"


class Town(BaseModel):
    name: str
    people: int


def test_the_parsing_helper_of_the_client_gets_its_object() -> None:
    with serving(Script(pieces=('{"name": "Ulm", ', '"people": 3}'))) as (client, fake):
        reply = client.chat.completions.parse(model="fake-model", messages=HI, response_format=Town)
    assert reply.choices[0].message.parsed == Town(name="Ulm", people=3)
    params = fake.seen[0].params.structured_outputs
    assert params is not None
    assert (params.kind, params.field) == ("json", "response_format")
