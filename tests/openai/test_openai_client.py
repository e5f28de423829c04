"""The unmodified `openai` client against a real server over a scripted engine, in every mode."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from pagedcore.errors import EngineClosedError, PromptTooLongError, QueueFullError, StepFailedError
from pagedcore.openai import ServerSettings, build_app
from support.fake_client import FakeClient, Gate, Script
from support.live_server import live_server

HI: Any = [{"role": "user", "content": "hi"}]
EURO = Script(pieces=("Hel", "lo", b"\xe2\x82", b"\xac!"), num_cached_tokens=2)


@contextmanager
def serving(fake: FakeClient, settings: ServerSettings | None = None, api_key: str = "any") -> Iterator[openai.OpenAI]:
    with live_server(build_app(fake, settings)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0) as client:
        yield client


def chat_pieces(chunks: Any, index: int = 0) -> list[str]:
    return [c.delta.content for chunk in chunks for c in chunk.choices if c.index == index and c.delta.content]


def test_chat_without_a_stream_gives_text_reason_usage_and_cached_tokens() -> None:
    with serving(FakeClient(EURO)) as client:
        reply = client.chat.completions.create(model="fake-model", messages=HI)
    assert reply.choices[0].message.content == "Hello€!"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    prompt = len("<user>hi<assistant>")
    usage = reply.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, 9, prompt + 9)
    assert usage.prompt_tokens_details.cached_tokens == 2


def test_a_chat_stream_opens_with_the_role_and_has_one_id_and_one_finish_reason() -> None:
    with serving(FakeClient(EURO)) as client:
        chunks = list(client.chat.completions.create(model="fake-model", messages=HI, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.role for c in chunks[1:]] == [None] * (len(chunks) - 1)
    assert chat_pieces(chunks) == ["Hel", "lo", "€!"]
    assert [c.choices[0].finish_reason for c in chunks] == [None, None, None, "stop"]
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert all("usage" not in c.model_fields_set for c in chunks)


def test_the_usage_chunk_comes_last_with_no_choices_and_only_when_asked() -> None:
    with serving(FakeClient(EURO)) as client:
        chunks = list(client.chat.completions.create(model="fake-model", messages=HI, stream=True, stream_options={"include_usage": True}))
        whole = client.chat.completions.create(model="fake-model", messages=HI)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert all("usage" in chunk.model_fields_set for chunk in chunks)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_continuous_usage_counts_up_in_every_chunk() -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    with serving(FakeClient(EURO)) as client:
        chunks = list(client.completions.create(model="fake-model", prompt="a", stream=True, stream_options=options))
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [3, 5, 7, 9, 9]


def test_choices_of_unequal_length_are_interleaved_and_all_complete() -> None:
    script = Script(choices=(("a1", "a2", "a3", "a4"), ("b1",), ("c1", "c2")))
    with serving(FakeClient(script)) as client:
        chunks = list(client.chat.completions.create(model="fake-model", messages=HI, n=3, stream=True))
        whole = client.chat.completions.create(model="fake-model", messages=HI, n=3)
    assert [chat_pieces(chunks, index) for index in range(3)] == [["a1", "a2", "a3", "a4"], ["b1"], ["c1", "c2"]]
    assert [c.message.content for c in whole.choices] == ["a1a2a3a4", "b1", "c1c2"]
    ends = [(c.index, c.finish_reason) for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert ends == [(1, "stop"), (2, "stop"), (0, "stop")]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 14


def test_several_prompts_of_one_completion_keep_their_order_and_reach_the_engine_at_once() -> None:
    fake = FakeClient(Script(pieces=("one", "!")), Script(pieces=("two",)), Script(pieces=("three", "?", ".")))
    with serving(fake) as client:
        whole = client.completions.create(model="fake-model", prompt=["x", "yy", "z"], n=2, max_tokens=99)
    assert [(c.index, c.text) for c in whole.choices] == list(enumerate(["one!", "one!", "two", "two", "three?.", "three?."]))
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 3 + 4, "each prompt counts once, with its beginning-of-sequence token"
    assert len({request.request_id for request in fake.seen}) == 3


@pytest.mark.parametrize("prompt", ["ab", ["ab", "ab"], [97, 98], [[97, 98], [97, 98]]])
def test_prompts_may_be_text_or_token_ids_alone_or_in_a_list(prompt: Any) -> None:
    fake = FakeClient()
    with serving(fake) as client:
        reply = client.completions.create(model="fake-model", prompt=prompt, extra_body={"add_special_tokens": False})
    assert [request.prompt_token_ids for request in fake.seen] == [[97, 98]] * len(reply.choices)


def test_a_length_stop_says_length_and_a_stop_string_says_stop_and_which() -> None:
    with serving(FakeClient(Script(pieces=("one END two",)))) as client:
        cut = client.chat.completions.create(model="fake-model", messages=HI, max_completion_tokens=3)
        stopped = client.chat.completions.create(model="fake-model", messages=HI, stop=["END"])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("one", "length")
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("one ", "stop")
    assert stopped.choices[0].model_dump()["stop_reason"] == "END"


def test_a_chat_gets_as_many_tokens_as_the_model_allows_and_a_completion_sixteen() -> None:
    fake = FakeClient()
    with serving(fake) as client:
        client.chat.completions.create(model="fake-model", messages=HI)
        client.completions.create(model="fake-model", prompt="a")
    assert [request.params.max_tokens for request in fake.seen] == [None, 16]


def test_every_sampling_field_reaches_the_engine() -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": -0.5, "n": 2,
    }  # fmt: skip
    extra: dict[str, Any] = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True, "min_tokens": 2, "stop_token_ids": [4],
        "bad_words": ["no"],
        "include_stop_str_in_output": True, "skip_special_tokens": False, "prompt_logprobs": 2,
    }  # fmt: skip
    fake = FakeClient()
    with serving(fake) as client:
        more = {**extra, "cache_salt": "salt", "priority": -3}
        client.chat.completions.create(model="fake-model", messages=HI, logit_bias={"5": 2}, stop="x", **sampling, extra_body=more)
    params, context = fake.seen[0].params, fake.seen[0].context
    for name, value in (sampling | extra).items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value), name
    assert (params.logit_bias, params.stop, params.max_tokens) == ({5: 2.0}, ("x",), None)
    assert (context.cache_salt, context.priority, context.adapter) == ("salt", -3, "library")


def test_completion_logprobs_name_tokens_offsets_and_alternatives() -> None:
    with serving(FakeClient(Script(pieces=("a", b"\xc3", b"\xa9", "z"), sampled_rank=3))) as client:
        logprobs = client.completions.create(model="fake-model", prompt="p", logprobs=1).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "z"]
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.token_logprobs == [-0.75] * 4
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"b": -0.25, "a": -0.75}


def test_chat_logprobs_hold_bytes_and_the_likeliest_tokens_only() -> None:
    with serving(FakeClient(Script(pieces=("a",), sampled_rank=3))) as client:
        logprobs = client.chat.completions.create(model="fake-model", messages=HI, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    token = logprobs.content[0]
    assert (token.token, token.logprob, token.bytes) == ("a", -0.75, [97])
    assert [(top.token, top.logprob, top.bytes) for top in token.top_logprobs] == [("b", -0.25, [98]), ("c", -0.5, [99])]


def test_echo_repeats_the_prompt_with_its_logprobs() -> None:
    with serving(FakeClient(Script(pieces=("x",)))) as client:
        choice = client.completions.create(model="fake-model", prompt="né", echo=True, logprobs=1).choices[0]
    assert choice.text == "néx"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["<bos>", "n", "bytes:\\xc3", "bytes:\\xa9", "x"]
    assert choice.logprobs.text_offset == [0, 0, 1, 1, 2]
    assert choice.logprobs.token_logprobs == [None, -0.25, -0.25, -0.25, -0.25]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] is None


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"logprobs": 2, "echo": True}, {"echo": True, "n": 2, "logprobs": 0}])
def test_a_completion_stream_adds_up_to_the_whole_reply(options: dict[str, Any]) -> None:
    script = Script(choices=(("He", b"\xe2\x82", b"\xacy", "you"), ("other",)))
    arguments: dict[str, Any] = {"model": "fake-model", "prompt": ["é", "b"], "max_tokens": 7, **options}
    with serving(FakeClient(script)) as client:
        chunks = list(client.completions.create(stream=True, **arguments))
        whole = client.completions.create(**arguments)
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason
        if choice.logprobs is not None:
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [item for part in parts if part.logprobs for item in getattr(part.logprobs, name)]
                assert joined == getattr(choice.logprobs, name), name


def test_a_chat_stream_adds_up_to_the_whole_reply_with_logprobs_and_token_ids() -> None:
    arguments: dict[str, Any] = {
        "model": "fake-model",
        "messages": HI,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"return_token_ids": True},
    }
    with serving(FakeClient(EURO)) as client:
        chunks = list(client.chat.completions.create(stream=True, **arguments))
        whole = client.chat.completions.create(**arguments).choices[0]
    assert "".join(chat_pieces(chunks)) == whole.message.content
    streamed = [token for chunk in chunks for c in chunk.choices if c.logprobs for token in c.logprobs.content or []]
    assert whole.logprobs is not None
    assert streamed == whole.logprobs.content
    ids = [token for chunk in chunks for token in chunk.choices[0].model_dump().get("token_ids", [])]
    assert ids == whole.model_dump()["token_ids"] == list("Hello€!".encode())
    assert whole.model_dump()["prompt_token_ids"] == list(b"<user>hi<assistant>")


def test_prompt_logprobs_come_once_by_token_id() -> None:
    body: dict[str, Any] = {"prompt_logprobs": 1, "add_special_tokens": False}
    with serving(FakeClient(Script(pieces=("x", "y")))) as client:
        whole = client.completions.create(model="fake-model", prompt="ab", extra_body=body).choices[0].model_dump()
        chunks = list(client.completions.create(model="fake-model", prompt="ab", extra_body=body, stream=True))
    assert whole["prompt_logprobs"] == [None, {"98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}}]
    assert [chunk.choices[0].model_dump().get("prompt_logprobs") for chunk in chunks] == [whole["prompt_logprobs"], None]


def test_developer_messages_and_text_parts_reach_the_template_as_plain_text() -> None:
    fake = FakeClient()
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "annotations": []},
    ]
    with serving(fake) as client:
        client.chat.completions.create(model="fake-model", messages=messages, extra_body={"chat_template_kwargs": {"tone": "dry"}})
    rendered, kwargs = fake.fake_text.chats[0]
    assert rendered == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
    ]
    assert kwargs == {"tone": "dry", "add_generation_prompt": True}


def test_continue_final_message_turns_the_generation_prompt_off() -> None:
    fake = FakeClient()
    with serving(fake) as client:
        client.chat.completions.create(model="fake-model", messages=HI, extra_body={"continue_final_message": True})
    assert fake.fake_text.chats[0][1] == {"add_generation_prompt": False, "continue_final_message": True}


def test_a_wrong_model_is_a_404_that_names_the_served_ones() -> None:
    with serving(FakeClient(model_names=("main", "org/alias"))) as client:
        with pytest.raises(openai.NotFoundError, match="served: main, org/alias"):
            client.chat.completions.create(model="gpt-9", messages=HI)
        assert client.chat.completions.create(model="org/alias", messages=HI).model == "org/alias"
        assert [model.id for model in client.models.list()] == ["main", "org/alias"]
        assert client.models.retrieve("org/alias").model_dump()["max_model_len"] == 4096


def test_a_full_queue_is_a_429_with_retry_after_also_for_a_stream() -> None:
    script = Script(error=QueueFullError("The queue is full.", retry_after_s=2.5))
    with serving(FakeClient(script)) as client:
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model="fake-model", messages=HI, stream=stream)
            assert caught.value.response.headers["Retry-After"] == "3"
            assert caught.value.code == "queue_full"


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineClosedError("The engine is closed."), openai.InternalServerError),
        (PromptTooLongError("Too long.", param="messages"), openai.BadRequestError),
        (StepFailedError("The step failed."), openai.InternalServerError),
    ],
)
def test_a_failure_before_the_first_token_is_an_http_error_also_for_a_stream(error: Any, kind: Any, raises: bool) -> None:
    with serving(FakeClient(Script(error=error, raises=raises))) as client:
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                client.chat.completions.create(model="fake-model", messages=HI, stream=stream)
            assert caught.value.status_code == error.http_status
            assert caught.value.code == error.code


def test_a_failure_in_mid_stream_raises_in_the_client_after_the_text_so_far() -> None:
    script = Script(pieces=("a", "b", "c"), error=StepFailedError("The step failed."), error_step=2)
    with serving(FakeClient(script)) as client:
        stream = client.chat.completions.create(model="fake-model", messages=HI, stream=True)
        seen: list[Any] = []
        with pytest.raises(openai.APIError, match="The step failed") as caught:
            seen.extend(stream)
    assert caught.value.code == "step_failed"
    assert chat_pieces(seen) == ["a", "b"]


def test_one_failing_prompt_fails_the_request_and_aborts_the_others() -> None:
    never = Gate()
    fake = FakeClient(Script(gates={0: never}), Script(error=StepFailedError("The step failed.")))
    with serving(fake) as client, pytest.raises(openai.InternalServerError):
        client.completions.create(model="fake-model", prompt=["a", "b"], extra_headers={"X-Request-Id": "two"})
    fake.wait_for_abort("two-0")
    assert fake.num_open == 0


def test_closing_a_stream_early_aborts_the_request() -> None:
    gate = Gate()
    fake = FakeClient(Script(pieces=("a", "b"), gates={1: gate}))
    with serving(fake) as client:
        headers = {"X-Request-Id": "left"}
        with client.chat.completions.create(model="fake-model", messages=HI, stream=True, extra_headers=headers) as stream:
            assert next(stream).choices[0].delta.role == "assistant"
        fake.wait_for_abort("left")
        assert fake.num_open == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_aborts_the_request(stream: bool) -> None:
    fake = FakeClient(Script(gates={0: Gate()}))
    with live_server(build_app(fake)) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            headers = {"X-Request-Id": "left"}
            call = client.chat.completions.create(model="fake-model", messages=HI, stream=stream, extra_headers=headers)
            task = asyncio.ensure_future(call)
            await asyncio.to_thread(fake.wait_for_request)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(fake.wait_for_abort, "left")


@pytest.mark.asyncio
async def test_the_async_client_streams_many_requests_at_once() -> None:
    gate = Gate()
    fake = FakeClient(Script(pieces=("a", "b"), gates={1: gate}))
    with live_server(build_app(fake)) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:

            async def text() -> str:
                stream = await client.chat.completions.create(model="fake-model", messages=HI, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            tasks = [asyncio.ensure_future(text()) for _ in range(8)]
            await asyncio.to_thread(fake.wait_for_request, 8)
            assert fake.num_open == 8
            gate.open()
            assert await asyncio.gather(*tasks) == ["ab"] * 8


def test_keys_open_the_server_and_name_the_tenant_and_user_never_does() -> None:
    settings = ServerSettings(api_keys=("plain",), tenants={"secret": "team-a"}, adapter="litserve")
    fake = FakeClient()
    with serving(fake, settings, api_key="secret") as client:
        client.chat.completions.create(model="fake-model", messages=HI, user="mallory")
        client.with_options(api_key="plain").chat.completions.create(model="fake-model", messages=HI, user="mallory")
        for key in ("wrong", "secre", "secret2", "SECRET"):
            with pytest.raises(openai.AuthenticationError) as caught:
                client.with_options(api_key=key).models.list()
            assert caught.value.code == "invalid_api_key"
    assert [request.context.tenant for request in fake.seen] == ["team-a", None]
    assert fake.seen[0].context.adapter == "litserve"
