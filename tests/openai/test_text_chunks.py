"""A chunk that adds nothing but text is written around a template; it is, byte for byte, what the long way writes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.openai.calls import Call, read_chat, read_completion
from pagedcore.openai.replies import REPLIES, Reply
from pagedcore.openai.settings import ServerSettings
from pagedcore.outputs import CompletionOutput, RequestOutput
from support.fake_client import FakeClient

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=2, max_size=6)
ODD = ['"\\', "\0", "\u2028\u2029", "\U0001f600", "</script>", "\x7f\x1f\n"]


def call_of(kind: str, **options: object) -> Call:
    client, settings = FakeClient(), ServerSettings()
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if kind == "chat" else {"prompt": "hi"}
    raw = json.dumps({"model": "fake-model", "stream": True, **prompt, **options}).encode()
    return (read_chat if kind == "chat" else read_completion)(raw, client, settings)


def sent(reply: Reply, texts: list[str]) -> list[bytes]:
    """What a client gets while these texts come one after another, the last one with the end."""
    events, whole = [], ""
    for number, text in enumerate(texts):
        whole += text
        reason = "stop" if number == len(texts) - 1 else None
        choice = CompletionOutput(0, whole, list(range(number + 1)), finish_reason=reason, new_text=text)
        events.append(reply.events(0, RequestOutput("r", "hi", [1], [choice], finished=choice.finished)))
    return events


def both_ways(kind: str, texts: list[str], **options: object) -> tuple[list[bytes], list[bytes]]:
    replies = [REPLIES[kind](call_of(kind, **options), "r", FakeClient().text, "assistant") for _ in range(2)]
    replies[1]._envelope, replies[1]._head = replies[0]._envelope, replies[0]._head
    assert replies[0]._around is not None
    replies[0]._around = replies[0]._around_text()
    replies[1]._around = None
    short, long = sent(replies[0], texts), sent(replies[1], texts)
    assert replies[0].usage() == replies[1].usage()
    return short, long


@pytest.mark.parametrize(
    "options", [{}, {"stream_options": {"include_usage": True}}, {"cache_report": True}], ids=["plain", "usage", "cache"]
)
@pytest.mark.parametrize("kind", ["chat", "completion"])
@given(texts=TEXTS)
def test_the_template_writes_what_the_long_way_writes(kind: str, options: dict[str, object], texts: list[str]) -> None:
    short, long = both_ways(kind, [*texts, *ODD, "end"], **options)
    assert short == long


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_model_with_an_odd_name_is_no_obstacle(kind: str) -> None:
    call = call_of(kind)
    reply = REPLIES[kind](call, "\0", FakeClient().text, "assistant")
    first, second, _ = sent(reply, ["a", "b", "end"])
    assert first.count(b"\\u0000") == second.count(b"\\u0000") == 1
    assert json.loads(second.removeprefix(b"data: "))["id"].endswith("\0")


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2},
        {"logprobs": True, "top_logprobs": 1},
        {"return_token_ids": True},
        {"stream_options": {"continuous_usage_stats": True, "include_usage": True}},
    ],
)
def test_chunks_that_show_more_than_text_have_no_template(options: dict[str, object]) -> None:
    assert REPLIES["chat"](call_of("chat", **options), "r", FakeClient().text, "assistant")._around is None
