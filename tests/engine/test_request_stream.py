"""One open request in the front: what its updates become, and that none is slept through."""

from __future__ import annotations

import _thread
import asyncio
import copy
import pickle  # noqa: TID251 - callers may pickle what they got
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.errors import EngineClosedError, QueueFullError, StepFailedError
from pagedcore.messages import AbortRequest, FinishRequest, InboxMessage, RequestUpdate
from pagedcore.outputs import CacheReport, Logprob, RequestOutput, RequestTimings
from pagedcore.request_stream import WAKE_AGAIN_UPDATES, LoopWaker, QueueWaker, RequestStream
from pagedcore.sampling_params import SamplingParams
from pagedcore.text.chat_template import ChatTemplate
from pagedcore.text.tokenizer import Tokenizer
from support.small_tokenizers import make_byte_level

TEXT = Tokenizer(make_byte_level(), {}, ChatTemplate({}))


def ids(text: str) -> list[int]:
    """One token a character."""
    return [TEXT.encode(char, add_special_tokens=False)[0] for char in text]


def make_stream(num_choices: int = 1, **params: object) -> tuple[RequestStream, list[InboxMessage]]:
    sent: list[InboxMessage] = []
    made = SamplingParams(max_tokens=100, **params)  # type: ignore[arg-type]
    return RequestStream("r", "p", [1], made, TEXT, sent.append, QueueWaker(), num_choices), sent


def advance(stream: RequestStream, *updates: RequestUpdate) -> RequestOutput:
    for update in updates:
        if update.finish_reason is not None:
            stream.note_end(update.request_id)
        stream.put(update)
    output = stream.advance()
    assert output is not None
    return output


def with_logprobs(text: str, **facts: object) -> RequestUpdate:
    tokens = ids(text)
    return RequestUpdate("r", tokens, new_logprobs=[{token: Logprob(-float(i + 1), 1)} for i, token in enumerate(tokens)], **facts)


def test_a_stop_string_in_the_update_that_ends_the_request_is_its_end() -> None:
    stream, sent = make_stream(stop=["b"])
    output = advance(stream, RequestUpdate("r", ids("a")), RequestUpdate("r", ids("b"), finish_reason="length", status="completed"))
    choice = output.outputs[0]
    assert (choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason) == ("a", ids("ab"), "stop", "b")
    assert output.finished
    assert sent == []  # the engine has ended it already


def test_a_stop_string_is_told_to_the_engine_once_and_what_comes_after_it_is_dropped() -> None:
    stream, sent = make_stream(stop=["b"])
    output = advance(stream, RequestUpdate("r", ids("ab")))
    assert (output.finished, output.outputs[0].text) == (False, "a")
    assert sent == [FinishRequest("r", 2, "b")]
    stream.put(RequestUpdate("r", ids("bc")))
    assert stream.advance() is None
    output = advance(stream, RequestUpdate("r", ids("d"), finish_reason="stop", stop_reason="b", status="completed"))
    assert (output.outputs[0].text, output.outputs[0].token_ids, output.status) == ("a", ids("ab"), "completed")
    assert len(sent) == 1


def test_a_text_that_was_complete_is_not_lost_to_a_later_failure() -> None:
    stream, _ = make_stream(stop=["b"])
    stream.put(RequestUpdate("r", ids("ab")))
    output = advance(stream, RequestUpdate("r", [], finish_reason="error", status="error", error=StepFailedError("device")))
    assert (output.status, output.error, output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("completed", None, "stop", "b")


@pytest.mark.parametrize(("includes", "text"), [(False, "a"), (True, "ab")])
def test_include_stop_str_keeps_the_string_and_the_same_tokens(includes: bool, text: str) -> None:
    stream, _ = make_stream(stop=["b"], include_stop_str_in_output=includes)
    output = advance(stream, RequestUpdate("r", ids("abc")))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == (text, ids("ab"))


@pytest.mark.parametrize(("min_tokens", "text", "num_tokens"), [(1, "a", 2), (2, "aba", 4), (4, "abab", 4)])
def test_a_stop_string_does_not_end_the_first_min_tokens(min_tokens: int, text: str, num_tokens: int) -> None:
    stream, sent = make_stream(stop=["b"], min_tokens=min_tokens)
    output = advance(stream, *(RequestUpdate("r", [token]) for token in ids("abab")))
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == (text, num_tokens)
    assert bool(sent) == (text != "abab")


def test_logprobs_end_where_the_kept_tokens_end() -> None:
    stream, _ = make_stream(stop=["b"], logprobs=0)
    choice = advance(stream, with_logprobs("abcd")).outputs[0]
    assert choice.logprobs is not None
    assert [list(entry) for entry in choice.logprobs] == [[token] for token in choice.token_ids] == [[token] for token in ids("ab")]
    assert choice.cumulative_logprob == -1.0 - 2.0
    assert [entry[token].decoded_token for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)] == ["a", "b"]


def test_a_stop_token_has_a_logprob_and_no_text() -> None:
    stream, _ = make_stream(logprobs=0)
    stop_id = ids("c")[0]
    choice = advance(
        stream, with_logprobs("ab"), with_logprobs("c", finish_reason="stop", stop_reason=stop_id, status="completed")
    ).outputs[0]
    assert (choice.text, choice.token_ids, choice.stop_reason) == ("ab", ids("abc"), stop_id)
    assert choice.logprobs is not None
    assert len(choice.logprobs) == 3
    assert choice.cumulative_logprob == -1.0 - 2.0 - 1.0


def test_prompt_logprobs_keep_none_first_and_get_their_text() -> None:
    stream, _ = make_stream(prompt_logprobs=0)
    token = ids("x")[0]
    output = advance(stream, RequestUpdate("r", ids("a"), prompt_logprobs=[None, {token: Logprob(-1.0, 1)}]))
    assert output.prompt_logprobs == [None, {token: Logprob(-1.0, 1, "x")}]


def test_a_choice_that_is_refused_ends_the_others_and_the_request_is_rejected() -> None:
    stream, sent = make_stream(num_choices=3)
    full = QueueFullError("full")
    output = advance(stream, RequestUpdate("r", ids("a")), RequestUpdate("r#1", [], finish_reason="error", status="rejected", error=full))
    assert (output.status, output.error, output.finished) == ("rejected", full, False)
    assert sent == [AbortRequest("r"), AbortRequest("r#2")]
    output = advance(stream, *(RequestUpdate(name, [], finish_reason="abort", status="aborted") for name in ("r", "r#2")))
    assert (output.status, output.error, output.finished) == ("rejected", full, True)
    assert [choice.finish_reason for choice in output.outputs] == ["abort", "error", "abort"]


def test_the_status_of_a_request_is_its_worst_choices() -> None:
    stream, _ = make_stream(num_choices=2)
    assert advance(stream, RequestUpdate("r", [], finish_reason="abort", status="aborted")).status == "aborted"
    failure = StepFailedError("device")
    output = advance(stream, RequestUpdate("r#1", [], finish_reason="error", status="error", error=failure))
    assert (output.status, output.error) == ("error", failure)


def test_one_choice_goes_on_when_another_is_done() -> None:
    stream, _ = make_stream(num_choices=2)
    output = advance(stream, RequestUpdate("r", ids("a"), finish_reason="length", status="completed"))
    assert (output.status, output.finished) == ("running", False)
    output = advance(stream, RequestUpdate("r#1", ids("b"), finish_reason="stop", status="completed"))
    assert (output.status, output.finished) == ("completed", True)


def test_the_times_of_a_request_are_its_first_beginning_and_its_last_end() -> None:
    stream, _ = make_stream(num_choices=2)
    advance(stream, RequestUpdate("r#1", [], finish_reason="stop", status="completed", timings=RequestTimings(1.0, 2.0, 3.0, 9.0)))
    output = advance(stream, RequestUpdate("r", [], finish_reason="stop", status="completed", timings=RequestTimings(1.0, 2.5, None, 5.0)))
    assert output.timings == RequestTimings(1.0, 2.0, 3.0, 9.0)


def test_an_engine_that_is_gone_is_no_error_of_the_stream() -> None:
    def refuse(message: InboxMessage) -> None:
        raise EngineClosedError("closed")

    stream = RequestStream("r", None, [1], SamplingParams(stop=["b"]), TEXT, refuse, QueueWaker(), 1)
    assert advance(stream, RequestUpdate("r", ids("ab"))).outputs[0].text == "a"
    assert not stream.abort()


@given(st.lists(st.tuples(st.sampled_from(["r", "r#1"]), st.text("abcé", max_size=3)), max_size=12), st.integers(0, 4))
def test_a_consumer_who_is_late_gets_what_a_prompt_one_gets(pieces: list[tuple[str, str]], min_tokens: int) -> None:
    def updates() -> list[RequestUpdate]:
        made = [RequestUpdate(request_id, ids(text)) for request_id, text in pieces]
        made[:1] = [RequestUpdate(first.request_id, first.new_token_ids, cache=CacheReport(1)) for first in made[:1]]
        return [*made, *(RequestUpdate(name, ids("ab"), finish_reason="length", status="completed") for name in ("r#1", "r"))]

    late, late_sent = make_stream(2, stop=["ab"], min_tokens=min_tokens)
    prompt, prompt_sent = make_stream(2, stop=["ab"], min_tokens=min_tokens)
    at_once = advance(late, *updates())
    for update in updates():
        prompt.put(update)
        prompt.absorb()
    assert choices_of(at_once) == choices_of(prompt.output())
    assert at_once.cache == prompt.output().cache
    assert late_sent == prompt_sent


def choices_of(output: RequestOutput) -> list[tuple[str, list[int], str | None, int | str | None]]:
    return [(choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason) for choice in output.outputs]


def test_tokens_of_several_steps_are_one_push_of_text_unless_something_stands_beside_them() -> None:
    stream, _ = make_stream(2)
    for update in (
        RequestUpdate("r", [1]), RequestUpdate("r", [2]), RequestUpdate("r#1", [3]), RequestUpdate("r", [4]),
        RequestUpdate("r", [5], cache=CacheReport(1)), RequestUpdate("r", [6]), RequestUpdate("r", [7]),
    ):  # fmt: skip
        stream.put(update)
    taken = stream._take_updates()
    assert [(update.request_id, update.new_token_ids) for update in taken] == [
        ("r", [1, 2]), ("r#1", [3]), ("r", [4]), ("r", [5]), ("r", [6, 7]),
    ]  # fmt: skip


def test_an_output_that_was_kept_does_not_grow_whenever_it_is_looked_at() -> None:
    stream, _ = make_stream()
    outputs = [advance(stream, RequestUpdate("r", [token])) for token in range(4)]
    looked_at_early = outputs[0].outputs[0].token_ids
    outputs.append(advance(stream, RequestUpdate("r", [4], finish_reason="length", status="completed")))
    assert [output.outputs[0].token_ids for output in outputs] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert looked_at_early == [0]
    looked_at_early.append(9)
    assert outputs[4].outputs[0].token_ids == [0, 1, 2, 3, 4], "the caller's list is the caller's own"
    again = pickle.loads(pickle.dumps(outputs[1]))
    assert again.outputs[0].token_ids == [0, 1]
    assert outputs[1].outputs[0] == copy.deepcopy(outputs[1].outputs[0])


def test_a_consumer_is_woken_once_then_again_after_many_updates_and_for_the_last() -> None:
    stream, _ = make_stream()
    woken = [stream.put(RequestUpdate("r", [5])) for _ in range(2 * WAKE_AGAIN_UPDATES)]
    assert [index for index, is_woken in enumerate(woken) if is_woken] == [0, WAKE_AGAIN_UPDATES - 1, 2 * WAKE_AGAIN_UPDATES - 1]
    assert stream.put(RequestUpdate("r", [], finish_reason="stop", status="completed"))


def test_a_thread_that_waits_sees_a_ctrl_c_that_came_as_it_fell_asleep() -> None:
    """Such a one wakes nobody up: `interrupt_main` leaves a mark and no more, as a signal does that comes between a look and the sleep."""
    waker = QueueWaker()
    press = threading.Timer(0.2, _thread.interrupt_main)
    press.start()
    with pytest.raises(KeyboardInterrupt):
        waker.wait()


@pytest.mark.parametrize("num_updates", [1, 3000])
def test_no_update_is_slept_through_by_a_thread(num_updates: int) -> None:
    waker = QueueWaker()
    stream = RequestStream("r", None, [1], SamplingParams(detokenize=False), None, lambda message: None, waker, 1)
    producer = threading.Thread(target=produce, args=(stream, num_updates))
    producer.start()
    while not stream.finished:
        for ready in waker.wait():
            ready.absorb()
    producer.join()
    assert stream.output().outputs[0].token_ids == list(range(num_updates))


@pytest.mark.asyncio
@pytest.mark.parametrize("num_updates", [1, 3000])
async def test_no_update_is_slept_through_by_a_coroutine(num_updates: int) -> None:
    waker = LoopWaker(asyncio.get_running_loop())
    stream = RequestStream("r", None, [1], SamplingParams(detokenize=False), None, lambda message: None, waker, 1)
    producer = threading.Thread(target=produce, args=(stream, num_updates))
    producer.start()
    seen: list[int] = []
    while not stream.finished:
        await stream.wait()
        output = stream.advance()
        seen += [] if output is None else output.outputs[0].new_token_ids
    producer.join()
    assert seen == list(range(num_updates))


@pytest.mark.asyncio
async def test_news_before_a_wait_and_behind_the_one_that_woke_end_the_next_wait_at_once_and_only_that() -> None:
    stream = RequestStream("r", None, [1], SamplingParams(), None, lambda message: None, LoopWaker(asyncio.get_running_loop()), 1)
    stream.notify()
    assert stream.wait().done()
    waiter = stream.wait()
    assert not waiter.done()
    stream.notify()
    stream.notify()
    await waiter
    assert stream.wait().done()
    assert not stream.wait().done()


def produce(stream: RequestStream, num_updates: int) -> None:
    for token in range(num_updates):
        is_last = token == num_updates - 1
        facts = {"finish_reason": "length", "status": "completed"} if is_last else {}
        if stream.put(RequestUpdate("r", [token], **facts)):
            stream.waker.wake([stream])
