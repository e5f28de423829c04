"""Requests through a socket: the same tokens, numbers, errors and ends as in the engine's own process."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest

from pagedcore import LLM, AsyncEngine, SamplingParams
from pagedcore.client import RequestContext
from pagedcore.errors import EngineClosedError, InvalidRequestError, PromptTooLongError
from pagedcore.messages import AbortRequest, AddRequest, InboxMessage, RequestUpdate
from pagedcore.outboxes import Outbox
from pagedcore.outputs import CompletionOutput, RequestOutput
from pagedcore.remote import frames
from pagedcore.remote.frames import Add
from pagedcore.remote.open_requests import OpenRequests
from support.core_builders import make_request
from support.engine_builder import expected_tokens
from support.remote_engines import ENDLESS, GREEDY, Hosted, connected, greeted, raw_front, run, wait_for


def whole(output: CompletionOutput) -> CompletionOutput:
    """Without what the last step added, which depends on how many updates came together."""
    return dataclasses.replace(output, new_text="", new_token_ids=[])


def test_tokens_through_a_socket_are_those_of_the_engine(one: Hosted) -> None:
    with connected(one) as front:
        assert front.info.model_names == one.built.engine.info.model_names
        prompts = [[1, 2, 3], list(range(30)), [7] * 50]
        for prompt in prompts:
            last = run(front, prompt)
            assert last.outputs[0].token_ids == expected_tokens(prompt, 12)
            assert (last.status, last.outputs[0].finish_reason) == ("completed", "length")
        seeded = SamplingParams(n=3, seed=5, max_tokens=4, logprobs=2, prompt_logprobs=1)
        there, here = run(front, [4, 5, 6], seeded), run(one.built.engine, [4, 5, 6], seeded)
        assert list(map(whole, there.outputs)) == list(map(whole, here.outputs))
        assert there.prompt_logprobs == here.prompt_logprobs is not None
        assert len(there.outputs[0].logprobs or []) == 4
        assert there.timings.arrival_s <= there.timings.queued_s <= there.timings.first_token_s <= there.delivered_s


def test_many_requests_of_many_fronts_at_once_all_get_their_own(one: Hosted) -> None:
    async def all_of(front: AsyncEngine, offset: int) -> None:
        async def whole(prompt: list[int]) -> None:
            outputs = [output async for output in front.generate(prompt, GREEDY)]
            assert outputs[-1].outputs[0].token_ids == expected_tokens(prompt, 12)

        await asyncio.gather(*(whole([offset, number]) for number in range(12)))

    with connected(one) as first, connected(one) as second:
        threads = [threading.Thread(target=asyncio.run, args=(all_of(front, n),)) for n, front in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert first.stats().num_finished["completed"] == 24


def test_two_fronts_may_choose_the_same_id_and_each_hears_of_its_own(one: Hosted) -> None:
    one.built.runner.gate.clear()
    with connected(one) as first, connected(one) as second:
        streams = [front.generate_sync(prompt, GREEDY, "mine") for front, prompt in ((first, [1]), (second, [2]))]
        results: dict[int, RequestOutput] = {}

        def drain(number: int) -> None:
            *_, results[number] = streams[number]

        threads = [threading.Thread(target=drain, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: one.server.num_open == 2, "both are there")
        one.built.runner.gate.set()
        for thread in threads:
            thread.join(60.0)
        assert [results[number].outputs[0].token_ids for number in range(2)] == [expected_tokens([1], 12), expected_tokens([2], 12)]
        assert {result.request_id for result in results.values()} == {"mine"}
        assert [front.history.find("mine")["prompt_tokens"] for front in (first, second)] == [1, 1]
        explained = [front.inspect_sync("request", request_id="mine")[0]["request_id"] for front in (first, second)]
        assert len(set(explained)) == 2, "the engine's own books keep them apart"


def test_a_prefix_that_one_front_computed_serves_another(one: Hosted) -> None:
    prompt = list(range(40))
    with connected(one) as first, connected(one) as second:
        assert run(first, prompt).num_cached_tokens == 0
        assert run(second, prompt).num_cached_tokens == 32
        assert run(one.built.engine, prompt).num_cached_tokens == 32
        books = [front.stats() for front in (first, second, one.built.engine)]
        assert [book.prefix_cache_hit_tokens for book in books] == [64, 64, 64], "one pool, one book"
        assert first.reset_prefix_cache()
        assert run(second, prompt).num_cached_tokens == 0


def test_unseeded_fronts_draw_different_seeds(one: Hosted) -> None:
    with connected(one) as first, connected(one) as second:
        assert first.info.seed == one.built.engine.info.seed
        assert second.info.seed != first.info.seed


def test_refusals_come_as_the_typed_errors_of_the_engine(one: Hosted) -> None:
    with connected(one) as front:
        last = run(front, [1] * 5000)
        assert last.status == "rejected"
        assert type(last.error) is PromptTooLongError
        assert last.error.param == "prompt"
        with pytest.raises(PromptTooLongError, match="max_model_len is 4000"):
            front.loop.check_request(5000, 1)


def test_an_id_that_is_in_use_is_refused_and_its_request_goes_on(one: Hosted) -> None:
    one.built.runner.gate.clear()
    with connected(one) as front:
        first: list[RequestUpdate] = []
        second: list[RequestUpdate] = []
        front.loop.submit(make_request("mine", [1], max_tokens=12), first.extend)
        front.loop.submit(make_request("mine", [1], max_tokens=12), second.extend)
        assert [type(update.error) for update in second] == [InvalidRequestError]
        front.loop.submit(AbortRequest("mine"), second.extend)  # not theirs
        one.built.runner.gate.set()
        wait_for(lambda: first and first[-1].finish_reason, "it has ended")
        assert [token for update in first for token in update.new_token_ids] == expected_tokens([1], 12)
        assert len(second) == 1


def test_a_front_that_says_an_id_twice_is_refused_by_the_engine_too(one: Hosted) -> None:
    one.built.runner.gate.clear()
    channel = greeted(raw_front(one))
    for _ in range(2):
        channel.put(Add(make_request("mine", [1], max_tokens=3)))
    (item,) = frames.decode_from_engine(channel.read() or b"").items
    assert item.facts.status == "rejected"
    one.built.runner.gate.set()
    wait_for(lambda: one.server.num_open == 0, "the first one has ended")
    assert one.built.engine.stats().num_finished["completed"] == 1
    channel.close()


def test_an_abort_reaches_the_engine_and_its_last_output_the_caller(one: Hosted) -> None:
    with connected(one) as front:
        stream = front.generate_sync([1, 2], ENDLESS, "mine")
        next(stream)
        front.abort_sync("mine")
        *_, last = stream
        assert (last.status, last.outputs[0].finish_reason) == ("aborted", "abort")
        assert not one.running_ids()


def test_leaving_a_stream_early_aborts_it(one: Hosted) -> None:
    with connected(one) as front:
        stream = front.generate_sync([1, 2], ENDLESS)
        next(stream)
        stream.close()
        wait_for(lambda: not one.running_ids(), "the request has ended")
        assert front.stats().num_finished["aborted"] == 1
        one.built.settle()


def test_prompts_of_one_llm_are_planned_together(one: Hosted) -> None:
    with LLM.connect(one.path) as llm:
        prompts = [[number] * 3 for number in range(8)]
        outputs = llm.generate(prompts, GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == [expected_tokens(prompt, 12) for prompt in prompts]
        before = llm.stats()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1))
        assert (llm.stats() - before).num_steps == 1
        llm.check()
        with pytest.raises(PromptTooLongError):
            llm.generate([[1] * 5000], GREEDY)
    assert run(one.built.engine, [1]).status == "completed", "the engine is not the LLM's to close"


def test_the_context_of_a_request_travels(one: Hosted) -> None:
    with connected(one) as front:
        context = RequestContext(tenant="t", request_class="c", adapter="langchain", cache_salt="s")
        *_, last = front.generate_sync([1, 2], GREEDY, "mine", context=context)
        assert last.status == "completed"
        record = one.built.engine.history.find("mine")
        assert (record["tenant"], record["class"], record["adapter"]) == ("t", "c", "langchain")


def test_a_grammar_is_compiled_beside_the_other_requests_of_its_front(one: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an abort that comes meanwhile reaches the engine after the request."""
    begins, goes_on, told = threading.Event(), threading.Event(), []
    submit = one.built.loop.submit

    def compiling(message: InboxMessage, outbox: Outbox) -> None:
        if message.request_id != "slow":
            submit(message, outbox)
            return
        if isinstance(message, AddRequest):
            begins.set()
            assert goes_on.wait(60.0)
        told.append(type(message))

    monkeypatch.setattr(one.built.loop, "submit", compiling)
    channel = greeted(raw_front(one))
    channel.put(Add(make_request("slow", [1], structured_outputs={"regex": "a"})))
    assert begins.wait(60.0)
    channel.put(frames.Abort("slow"))
    channel.put(Add(make_request("quick", [2], max_tokens=1)))
    updates = frames.decode_from_engine(channel.read() or b"")
    assert [item.request_id for item in updates.items] == ["quick"]
    assert told == []
    goes_on.set()
    wait_for(lambda: told == [AddRequest, AbortRequest], "both in their order")
    channel.close()


def test_a_grammar_that_cannot_be_compiled_for_a_reason_of_its_own_ends_its_request(
    one: Hosted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("the library fell over")

    monkeypatch.setattr(one.built.loop, "submit", broken)
    channel = greeted(raw_front(one))
    channel.put(Add(make_request("mine", [1], structured_outputs={"regex": "a"})))
    (item,) = frames.decode_from_engine(channel.read() or b"").items
    assert (item.facts.status, item.facts.error.message) == ("error", "ValueError: the library fell over")
    wait_for(lambda: one.server.num_open == 0, "its end")
    channel.close()


@pytest.mark.parametrize("wrong", [{"priority": 2**70}, {"tenant": "\ud800"}, {"cache_salt": "\ud800"}])
def test_what_no_message_holds_is_refused_and_its_id_stays_free(one: Hosted, wrong: dict[str, Any]) -> None:
    front = one.connect()
    with pytest.raises(InvalidRequestError, match=r"cannot be sent to the engine's process|half a surrogate pair"):
        list(front.generate_sync([1, 2, 3], GREEDY, "mine", context=RequestContext(**wrong)))
    assert list(front.generate_sync([1, 2, 3], GREEDY, "mine"))[-1].status == "completed"
    front.close_sync()


def test_a_receiver_that_fails_loses_its_own_request_and_nobody_elses(one: Hosted) -> None:
    def failing(_: list[RequestUpdate]) -> None:
        raise ConnectionError("whoever listened is gone")

    with connected(one) as front:
        first, last = [], []
        with front.loop.gathering():
            for name, outbox in (("first", first.extend), ("broken", failing), ("last", last.extend)):
                front.loop.submit(make_request(name, [1, 2], max_tokens=3000), outbox)
        wait_for(lambda: first and last, "the others hear of theirs")
        wait_for(lambda: "broken" not in one.running_ids(), "what nobody takes is given up")
        front.loop.close()
        assert {told[-1].status for told in (first, last)} == {"aborted"}
    assert one.built.engine.stats().num_finished == {"completed": 0, "aborted": 3, "rejected": 0, "error": 0}


def test_when_the_link_is_lost_each_hears_of_it_whoever_else_fails() -> None:
    def failing(_: list[RequestUpdate]) -> None:
        raise ConnectionError("whoever listened is gone")

    told: list[RequestUpdate] = []
    requests = OpenRequests()
    for name, outbox in (("first", told.extend), ("broken", failing), ("last", told.extend)):
        requests.open(make_request(name, [1, 2]), outbox)
    assert len(requests.fail_all(EngineClosedError("it was killed"))) == 3
    assert {update.request_id: update.status for update in told} == {"first": "error", "last": "error"}
