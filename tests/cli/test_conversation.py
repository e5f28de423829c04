"""`pagedcore chat`: what is kept of a conversation, and what ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from pagedcore.commands.conversation import Conversation, run_chat
from pagedcore.errors import PromptTooLongError, RequestError
from pagedcore.sampling_params import SamplingParams
from support.scripted_engine import ScriptedEngine


def make_conversation(engine: ScriptedEngine, system: str | None = None) -> Conversation:
    return Conversation(engine, SamplingParams(temperature=0.0), system)  # type: ignore[arg-type]


def reader(lines: Iterable[str | BaseException]) -> Callable[[], str]:
    left = iter(lines)

    def read() -> str:
        item = next(left, EOFError())
        if isinstance(item, BaseException):
            raise item
        return item

    return read


def talk(engine: ScriptedEngine, *lines: str) -> str:
    written: list[str] = []
    run_chat(make_conversation(engine), reader(lines), written.append)
    return "".join(written)


def test_each_turn_sends_all_earlier_ones() -> None:
    engine = ScriptedEngine()
    conversation = make_conversation(engine, system="S")
    assert list(conversation.ask("one")) == ["Par", "is"]
    assert list(conversation.ask("two")) == ["Par", "is"]
    assert engine.asked[1][0] == "system:S\nuser:one\nassistant:Paris\nuser:two\n"
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "S"}]


def test_an_answer_left_early_is_aborted_and_not_kept() -> None:
    engine = ScriptedEngine()
    conversation = make_conversation(engine)
    answer = conversation.ask("one")
    assert next(answer) == "Par"
    answer.close()  # type: ignore[attr-defined]
    assert engine.num_closed_early == 1
    assert conversation.messages == []


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    engine = ScriptedEngine()
    written: list[str] = []

    def write(text: str) -> None:
        if text == "is" and len(engine.asked) == 1:
            raise KeyboardInterrupt
        written.append(text)

    run_chat(make_conversation(engine), reader(["one", "two"]), write)
    assert "(stopped; not kept)" in "".join(written)
    assert [prompt for prompt, _, _ in engine.asked] == ["user:one\n", "user:two\n"]


def test_a_refused_turn_is_said_and_leaves_no_trace() -> None:
    engine = ScriptedEngine(error=PromptTooLongError("The prompt has 9000 tokens."))
    conversation = make_conversation(engine)
    written: list[str] = []
    run_chat(conversation, reader(["one"]), written.append)
    assert "error: The prompt has 9000 tokens. /reset starts over." in "".join(written)
    assert conversation.messages == []


def test_slash_commands() -> None:
    engine = ScriptedEngine(num_cached_tokens=3)
    shown = talk(engine, "/stats", "hi", "/stats", "/reset", "again", "", "/help", "/quit", "never")
    assert "(nothing asked yet)" in shown
    assert "(cache: 3 of 8 prompt tokens" in shown
    assert [prompt for prompt, _, _ in engine.asked] == ["user:hi\n", "user:again\n"]


@pytest.mark.parametrize("end", [EOFError(), KeyboardInterrupt()])
def test_the_end_of_the_input_ends_the_chat(end: BaseException) -> None:
    written: list[str] = []
    run_chat(make_conversation(ScriptedEngine()), reader([end]), written.append)
    assert written[-1] == "\n"


def test_a_chat_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(RequestError, match="needs a tokenizer"):
        list(make_conversation(ScriptedEngine(text=None)).ask("hi"))
