"""A front at a socket is a front like any other: the same tokens, numbers, errors and ends."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pagedcore import LLM, AsyncEngine, SamplingParams
from pagedcore.client import RequestContext
from pagedcore.errors import (
    ConfigError,
    EngineClosedError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    PromptTooLongError,
)
from pagedcore.messages import AbortRequest, AddRequest, InboxMessage, RequestUpdate
from pagedcore.outboxes import Outbox
from pagedcore.outputs import CompletionOutput, RequestOutput
from pagedcore.remote import connection, frames, server
from pagedcore.remote.address import connect_to
from pagedcore.remote.channel import Channel
from pagedcore.remote.frames import Add, Call, Hello, encode, protocol
from support.core_builders import make_request
from support.engine_builder import expected_tokens, make_engine
from support.remote_engines import ENDLESS, Hosted, connected, host, hosted, short_folder, wait_for
from support.repository import ROOT

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture
def one() -> Iterator[Hosted]:
    with hosted() as running:
        yield running


def run(engine: AsyncEngine, prompt: list[int], params: SamplingParams = GREEDY, request_id: str | None = None) -> RequestOutput:
    *_, last = engine.generate_sync(prompt, params, request_id)
    return last


def whole(output: CompletionOutput) -> CompletionOutput:
    """Without what the last step added, which depends on how many updates came together."""
    return dataclasses.replace(output, new_text="", new_token_ids=[])


def raw_front(one: Hosted) -> Channel:
    """A front that says what the test wants."""
    return Channel(connect_to(one.path), lambda frames: map(encode, frames), name="test")


def greeted(channel: Channel) -> Channel:
    channel.put(Hello(protocol(), "test"))
    assert isinstance(frames.decode_from_engine(channel.read() or b""), frames.Welcome)
    return channel


# ---- requests


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
            thread.join(30.0)
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
            thread.join(30.0)
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


# ---- questions


def test_every_question_of_an_engine_is_answered_as_there(one: Hosted) -> None:
    engine = one.built.engine
    with connected(one) as front:
        run(front, [1, 2, 3], request_id="mine")
        assert front.plan.memory == engine.plan.memory
        assert front.history.find("mine") == engine.history.find("mine")
        assert front.history.find("unknown") is None
        assert front.history.recent(5, "mine") == engine.history.recent(5, "mine")
        assert front.advice().num_lookups == engine.advice().num_lookups == 1
        assert front.inspect_sync("explain", request_id="mine") == engine.inspect_sync("explain", request_id="mine")
        assert front.inspect_sync("stats")[0]["num_steps"] == 12
        front.check()
        with pytest.raises(InvalidRequestError, match="The question is"):
            front.inspect_sync("why")
        with pytest.raises(InvalidRequestError, match="no call 'rm'"):
            front.loop.ask("rm")
        text, content_type = asyncio.run(front.metrics_text())
        assert content_type.startswith("text/plain")
        assert b"# HELP" in text


def test_files_are_written_where_the_front_is(one: Hosted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with connected(one) as front:
        front.record_trace("requests.jsonl")
        run(front, [1, 2, 3])
        front.record_trace(None)
        front.trace("trace.json")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.jsonl", "trace.json"]
        with pytest.raises(ConfigError, match="cannot be written"):
            front.trace("no/such/folder.json")


def test_a_check_that_fails_there_fails_here(one: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("the books disagree")

    monkeypatch.setattr(one.built.loop._scheduler, "check_invariants", fail)
    with connected(one) as front, pytest.raises(AssertionError, match="the books disagree"):
        front.check()
    monkeypatch.undo()


def test_a_fault_in_an_answer_is_the_callers_and_nobody_elses(one: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one.built.loop._recorder, "stats", lambda: {}["missing"])
    with connected(one) as front:
        with pytest.raises(EngineError, match="KeyError: 'missing'"):
            front.stats()
        monkeypatch.undo()
        assert front.stats().num_steps == 0


def test_a_shared_engine_is_not_warmed_up_by_one_of_its_fronts(one: Hosted) -> None:
    with connected(one) as front, pytest.raises(EngineError, match="shared by several processes"):
        front.warm_up([[1, 2, 3]])


# ---- fronts that leave, or misbehave


def test_the_requests_of_a_front_that_vanishes_are_aborted_and_no_others(one: Hosted) -> None:
    one.built.runner.gate.clear()
    channel = greeted(raw_front(one))
    for number in range(3):
        channel.put(Add(make_request(f"r{number}", [number + 1], max_tokens=3000)))
    with connected(one) as other:
        stream = other.generate_sync([9], GREEDY)
        thread = threading.Thread(target=lambda: results.extend(stream))
        results: list[RequestOutput] = []
        thread.start()
        wait_for(lambda: one.server.num_open == 4, "all are there")
        channel.close()
        one.built.runner.gate.set()
        thread.join(30.0)
        assert results[-1].outputs[0].token_ids == expected_tokens([9], 12)
        wait_for(lambda: not one.running_ids(), "the others have ended")
        assert other.stats().num_finished["aborted"] == 3
    wait_for(lambda: one.server.num_fronts == 0, "nothing is kept of them")
    one.built.settle()


def test_closing_a_front_ends_its_requests_and_says_so(one: Hosted) -> None:
    front = one.connect()
    stream = front.generate_sync([1], ENDLESS)
    next(stream)
    front.close_sync()
    *_, last = stream
    assert (last.status, last.outputs[0].finish_reason) == ("aborted", "abort")
    with pytest.raises(EngineClosedError, match="closed"):
        next(front.generate_sync([1], GREEDY))
    with pytest.raises(EngineClosedError):
        front.stats()
    front.close_sync()
    assert run(one.built.engine, [1]).status == "completed"


def test_a_forgotten_front_leaves(one: Hosted) -> None:
    front = one.connect()
    wait_for(lambda: one.server.num_fronts == 1, "it is there")
    del front
    gc.collect()
    wait_for(lambda: one.server.num_fronts == 0, "it has left")


def test_a_front_holds_no_garbage_back(one: Hosted) -> None:
    frozen = gc.get_freeze_count()
    with connected(one) as front:
        run(front, [1])
        assert gc.get_freeze_count() == frozen


def test_a_front_that_stops_reading_is_cut_off_and_holds_up_nobody(
    one: Hosted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "MAX_WAITING_UPDATES", 300)
    channel = greeted(raw_front(one))
    channel._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    long_id = "r" * 100_000  # so that few updates fill the socket
    with connected(one) as other, caplog.at_level(logging.WARNING):
        for number in range(4):
            channel.put(Add(make_request(f"{number}{long_id}", [number + 1], max_tokens=3000)))
        wait_for(lambda: "was cut off" in caplog.text, "it is cut off")
        wait_for(lambda: not one.running_ids(), "its requests have ended")
        assert run(other, [5]).outputs[0].token_ids == expected_tokens([5], 12)
    assert len([record for record in caplog.records if "has not read the last 300 updates" in record.message]) >= 1
    channel.close()


def test_a_front_that_sends_junk_is_cut_off_alone(one: Hosted, caplog: pytest.LogCaptureFixture) -> None:
    channel = greeted(raw_front(one))
    channel.put(Add(make_request("a", [1], max_tokens=3000)))
    channel.put({"not": "a frame"})
    for _ in iter(channel.read, None):
        pass  # until it is cut off
    wait_for(lambda: not one.running_ids(), "its request has ended")
    assert "what is no message of ours" in caplog.text
    with connected(one) as front:
        assert run(front, [1]).status == "completed"
    channel.close()


def test_a_front_of_another_version_is_refused_with_both_versions(one: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedcore.remote import link

    monkeypatch.setattr(link, "protocol", lambda: "1-of-another-version")
    with pytest.raises(EngineUnreachableError, match="run the same version on both sides"):
        one.connect()


def test_whoever_says_no_hello_is_refused(one: Hosted) -> None:
    for first in (Call(0, "stats", {}), {"GET": "/"}):
        channel = raw_front(one)
        channel.put(first)
        while (body := channel.read()) is not None:
            assert isinstance(frames.decode_from_engine(body), frames.Refusal)
        channel.close()


def test_a_process_of_another_user_is_refused_and_logged(
    one: Hosted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "peer_uid", lambda _: os.getuid() + 7)
    with pytest.raises(EngineUnreachableError, match="another user's"):
        one.connect()
    assert f"A process of user {os.getuid() + 7} was refused" in caplog.text


# ---- engines that leave


def test_a_draining_engine_finishes_what_runs_and_takes_nothing_new(one: Hosted) -> None:
    one.built.runner.gate.clear()
    with connected(one) as front:
        outputs: list[RequestOutput] = []
        thread = threading.Thread(target=lambda: outputs.extend(front.generate_sync([1], GREEDY)))
        thread.start()
        wait_for(lambda: one.server.num_open == 1, "it is there")
        one.server.begin_drain()
        wait_for(lambda: not asyncio.run(front.is_ready()), "the front knows")
        with pytest.raises(EngineClosedError, match="draining"):
            next(front.generate_sync([2], GREEDY))
        channel = greeted(raw_front(one))  # one that comes late, and does not listen
        assert isinstance(frames.decode_from_engine(channel.read() or b""), frames.Refusal)
        channel.put(Add(make_request("late", [1])))
        (item,) = frames.decode_from_engine(channel.read() or b"").items
        assert item.facts.error.kind == "EngineClosedError"
        channel.close()
        one.built.runner.gate.set()
        thread.join(20.0)
        assert outputs[-1].outputs[0].token_ids == expected_tokens([1], 12)
        wait_for(lambda: one.server.num_open == 0, "nothing is open")


def test_fronts_come_back_when_an_engine_of_the_same_model_does() -> None:
    with short_folder() as folder:
        first = host(folder / "e.sock")
        front = first.connect()
        stream = front.generate_sync([1], ENDLESS)
        next(stream)
        first.close()
        *_, last = stream
        assert last.status == "aborted"
        wait_for(lambda: not asyncio.run(front.is_ready()), "the front knows")
        assert asyncio.run(front.is_alive()), "it waits for another engine"
        with pytest.raises(EngineClosedError) as caught:
            next(front.generate_sync([1], GREEDY))
        assert caught.value.retry_after_s > 0
        with pytest.raises(EngineClosedError):
            asyncio.run(front.check_health())
        second = host(folder / "e.sock")
        wait_for(lambda: asyncio.run(front.is_ready()), "the front is back")
        assert run(front, [1]).outputs[0].token_ids == expected_tokens([1], 12)
        front.close_sync()
        second.close()


def test_an_engine_of_another_model_is_not_taken_for_the_old_one() -> None:
    with short_folder() as folder:
        first = host(folder / "e.sock")
        front = first.connect()
        first.close()
        second = host(folder / "e.sock", max_model_len=128)
        wait_for(lambda: not front.loop.is_alive, "the front gives up")
        with pytest.raises(EngineClosedError, match="another model than before; connect anew"):
            front.stats()
        front.close_sync()
        second.close()


def test_connecting_waits_as_long_as_it_is_told() -> None:
    with short_folder() as folder:
        with pytest.raises(EngineUnreachableError):
            AsyncEngine.connect(folder / "e.sock")
        started: list[Hosted] = []
        timer = threading.Timer(0.2, lambda: started.append(host(folder / "e.sock")))
        timer.start()
        front = AsyncEngine.connect(folder / "e.sock", timeout_s=20.0)
        assert run(front, [1]).status == "completed"
        front.close_sync()
        timer.join()
        started[0].close()


def test_requests_that_a_closed_engine_still_had_end_with_it() -> None:
    with hosted() as one, connected(one) as front:
        stream = front.generate_sync([1], ENDLESS)
        next(stream)
        one.built.engine.close_sync()
        *_, last = stream
        assert last.status == "aborted"
        last = run(front, [1])
        assert isinstance(last.error, EngineClosedError)


def test_large_frames_pass_and_absurd_lengths_do_not(one: Hosted) -> None:
    with connected(one) as front:
        last = run(front, [1, 2], request_id="x" * 3_000_000)
        assert len(last.request_id) == 3_000_000
    sock = connect_to(one.path)
    sock.sendall(b"\xff\xff\xff\xff")
    sock.settimeout(20.0)
    assert sock.recv(100) == b"", "cut off at once, not after four gigabytes"
    sock.close()


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
            assert goes_on.wait(20.0)
        told.append(type(message))

    monkeypatch.setattr(one.built.loop, "submit", compiling)
    channel = greeted(raw_front(one))
    channel.put(Add(make_request("slow", [1], structured_outputs={"regex": "a"})))
    assert begins.wait(20.0)
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
    assert one.server.num_open == 0
    channel.close()


def test_what_cannot_travel_is_the_callers_error_and_the_link_goes_on(one: Hosted) -> None:
    with connected(one) as front:
        with pytest.raises(TypeError, match="object"):
            front.inspect_sync("explain", request_id=object())
        assert run(front, [1]).status == "completed"


def test_a_fault_in_the_links_thread_leaves_nobody_waiting(one: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("on purpose")

    front = one.connect()
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(front.loop, "_take", broken)
    last = run(front, [1])
    assert isinstance(last.error, EngineClosedError)
    assert "link to the engine failed" in str(last.error)
    with pytest.raises(EngineClosedError, match="connect anew"):
        front.stats()
    front.close_sync()


def test_the_room_needs_no_torch_and_no_metrics_library_to_be_imported() -> None:
    names = [path.stem for path in Path(frames.__file__).parent.glob("*.py") if path.stem != "__init__"]
    code = (
        f"import sys, importlib; [importlib.import_module('pagedcore.remote.' + name) for name in {names}]\n"
        "assert not {'torch', 'prometheus_client', 'fastapi', 'uvicorn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    code = "import sys; import pagedcore, pagedcore.async_engine; assert 'msgspec' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_encoded_answers_are_decoded_by_type() -> None:
    """What a call returns is plain data: a wrong type is an error, not a surprise."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encode({"a": 1}), type=list[int])


def test_an_engine_in_this_process_has_no_remote_part() -> None:
    built = make_engine()
    assert built.engine.loop is built.loop
    built.engine.close_sync()


def test_a_front_is_not_let_go_before_its_last_update_is_in_the_channel(one: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The id is free first, since the front may use it again as soon as it reads the update."""
    seen: list[tuple[int, str | None]] = []
    put = Channel.put

    def looking(channel: Channel, item: object) -> None:
        if isinstance(item, list):
            (served,) = one.server._connections
            seen.append((one.server.num_open, served._ids.engine_id("mine")))
        put(channel, item)

    with connected(one) as front:
        monkeypatch.setattr(Channel, "put", looking)
        run(front, [1], SamplingParams(max_tokens=1), "mine")
        wait_for(lambda: one.server.num_open == 0, "it is let go")
    assert seen == [(1, None)]
