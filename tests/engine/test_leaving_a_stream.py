"""Callers leave in every way there is: the engine stops working for them, forgets them, and their id is free again."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress

import pytest

from pagedcore.client import RequestContext
from pagedcore.errors import EngineClosedError, InvalidRequestError
from pagedcore.messages import AbortRequest, AddRequest, RequestUpdate
from pagedcore.outputs import RequestOutput
from pagedcore.request_stream import WAKE_AGAIN_UPDATES
from pagedcore.sampling_params import SamplingParams
from support.engine_builder import Built, expected_tokens, make_engine

PROMPT = list(range(1, 21))
LONG = SamplingParams(max_tokens=20_000, temperature=0.0)
"""Goes on until somebody ends it: the fake model takes longer and longer for a token."""
SHORT = SamplingParams(max_tokens=6, temperature=0.0)


def make_roomy_engine(**options: object) -> Built:
    return make_engine(max_model_len=20_100, num_blocks=2600, **options)  # type: ignore[arg-type]


async def collect(built: Built, request_id: str | None = None) -> list[RequestOutput]:
    return [output async for output in built.engine.generate(PROMPT, SHORT, request_id)]


async def by_break(built: Built) -> None:
    async for _ in built.engine.generate(PROMPT, LONG, "r"):
        break
    await until_left(built)


async def by_exception(built: Built) -> None:
    with suppress(ZeroDivisionError):
        async for _ in built.engine.generate(PROMPT, LONG, "r"):
            raise ZeroDivisionError
    await until_left(built)


async def by_closing(built: Built) -> None:
    async with aclosing(built.engine.generate(PROMPT, LONG, "r")) as stream:  # type: ignore[type-var]
        await anext(stream)


async def by_cancellation(built: Built) -> None:
    built.runner.gate.clear()
    built.runner.waiting.clear()
    task = asyncio.create_task(collect_long(built))
    await asyncio.to_thread(built.runner.waiting.wait, 60.0)
    task.cancel()
    built.runner.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_timeout(built: Built) -> None:
    built.runner.gate.clear()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(collect_long(built), 0.05)
    built.runner.gate.set()


async def by_thread(built: Built) -> None:
    def serve() -> None:
        stream = built.engine.generate_sync(PROMPT, LONG, "r")
        next(stream)
        stream.close()  # type: ignore[attr-defined]

    await asyncio.to_thread(serve)


async def by_forgetting_in_a_thread(built: Built) -> None:
    def serve() -> None:
        stream = built.engine.generate_sync(PROMPT, LONG, "r")
        next(stream)

    await asyncio.to_thread(serve)
    gc.collect()


async def until_left(built: Built) -> None:
    """A generator that is only dropped is closed by its event loop, in one of the next turns."""
    gc.collect()
    while built.engine.front.num_open:  # noqa: ASYNC110  only its loop knows when
        await asyncio.sleep(0)


async def collect_long(built: Built) -> None:
    async for _ in built.engine.generate(PROMPT, LONG, "r"):
        pass


WAYS = (by_break, by_exception, by_closing, by_cancellation, by_timeout, by_thread, by_forgetting_in_a_thread)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("leave", WAYS, ids=lambda leave: leave.__name__)
def test_whoever_leaves_is_aborted_and_may_come_back_under_the_same_id(leave: Callable[[Built], Awaitable[None]], overlap: bool) -> None:
    built = make_roomy_engine(overlap=overlap)

    async def main() -> list[RequestOutput]:
        await leave(built)
        return await collect(built, "r")

    outputs = asyncio.run(main())
    assert outputs[-1].status == "completed"
    assert [t for o in outputs for t in o.outputs[0].new_token_ids] == expected_tokens(PROMPT, 6)
    assert built.engine.front.drain(60.0)
    built.settle()
    stats = built.engine.stats()
    assert (stats.num_finished["aborted"], stats.num_finished["completed"]) == (1, 1)
    assert (stats.num_running, stats.num_active_blocks, built.engine.front.num_open) == (0, 0, 0)
    built.engine.close_sync()


def test_a_thread_may_come_back_under_the_same_id_at_once() -> None:
    built = make_roomy_engine()
    for _ in range(20):
        stream = built.engine.generate_sync(PROMPT, LONG, "r")
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    assert list(built.engine.generate_sync(PROMPT, SHORT, "r"))[-1].outputs[0].token_ids == expected_tokens(PROMPT, 6)
    built.engine.close_sync()


def test_a_stream_that_nobody_iterates_sends_nothing() -> None:
    built = make_roomy_engine()

    async def main() -> None:
        stream = built.engine.generate(PROMPT, LONG)
        assert built.engine.front.num_open == 0
        del stream
        gc.collect()

    asyncio.run(main())
    idle = built.engine.generate_sync(PROMPT, LONG)
    assert built.engine.front.num_open == 0
    del idle
    built.engine.check()
    assert built.engine.stats().num_finished["aborted"] == 0
    assert built.engine.stats().prefix_cache_query_tokens == 0
    built.engine.close_sync()


def test_a_request_whose_event_loop_was_closed_is_aborted_and_forgotten() -> None:
    built = make_roomy_engine()
    loop = asyncio.new_event_loop()
    stream = built.engine.generate(PROMPT, LONG)
    built.runner.gate.clear()
    first = loop.create_task(anext(stream))  # type: ignore[arg-type]
    loop.call_later(0.0, built.runner.gate.set)
    loop.run_until_complete(first)
    loop.close()  # from here on nobody consumes, and the stream may have been woken already
    assert built.engine.front.drain(60.0)
    assert built.engine.front.num_open == 0
    assert built.engine.stats().num_finished["aborted"] == 1
    built.engine.close_sync()


def test_a_closed_event_loop_is_noticed_though_its_stream_was_woken_before() -> None:
    built = make_roomy_engine(gate_open=False)
    front = built.engine.front
    loop = asyncio.new_event_loop()
    stream = built.engine.generate(PROMPT, LONG, "r")
    task = loop.create_task(anext(stream))  # type: ignore[arg-type]
    loop.call_soon(lambda: loop.call_soon(loop.stop))
    loop.run_forever()  # the request is sent
    front.deliver([RequestUpdate("r", [1])])  # its stream is woken
    loop.run_until_complete(task)
    front.deliver([RequestUpdate("r", [1])])  # and again, which nobody will notice
    loop.close()
    for _ in range(WAKE_AGAIN_UPDATES):
        assert front.num_open == 1
        front.deliver([RequestUpdate("r", [1])])
        if front.num_open == 0:
            break
    assert front.num_open == 0
    built.runner.gate.set()
    assert front.drain(60.0)
    assert built.engine.stats().num_finished["aborted"] == 1
    built.engine.close_sync()


def test_a_blocked_thread_wakes_when_the_engine_closes() -> None:
    built = make_roomy_engine(gate_open=False)
    outputs: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: outputs.extend(built.engine.generate_sync(PROMPT, LONG)))
    thread.start()
    assert built.runner.waiting.wait(60.0)
    closing = threading.Thread(target=built.engine.close_sync)
    closing.start()
    built.runner.gate.set()
    thread.join(60.0)
    closing.join(60.0)
    assert outputs[-1].finished
    assert outputs[-1].status == "aborted"


def test_aborting_when_the_engine_is_closed_or_the_id_is_unknown_does_nothing() -> None:
    built = make_roomy_engine()
    built.engine.abort_sync("nobody")
    stream = built.engine.generate_sync(PROMPT, LONG, "r")
    next(stream)
    built.engine.close_sync()
    built.engine.abort_sync("r")
    asyncio.run(built.engine.abort("r"))
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(EngineClosedError):
        next(built.engine.generate_sync(PROMPT, LONG, "r"))


def test_a_draining_engine_waits_for_requests_whose_callers_have_left() -> None:
    built = make_roomy_engine(gate_open=False)
    stream = built.engine.generate_sync(PROMPT, LONG)
    leaving = threading.Thread(target=lambda: next(stream))
    leaving.start()
    assert built.runner.waiting.wait(60.0)
    built.runner.gate.set()
    leaving.join(60.0)
    built.runner.gate.clear()
    stream.close()  # type: ignore[attr-defined]
    assert built.engine.front.num_open == 0
    assert not built.engine.front.drain(0.0) or built.engine.stats().num_finished["aborted"] == 1
    built.runner.gate.set()
    assert built.engine.front.drain(60.0)
    built.engine.close_sync()


class Outbox:
    """Collects updates, and says when a last one came."""

    def __init__(self) -> None:
        self.updates: list[RequestUpdate] = []
        self.has_ended = threading.Event()

    def __call__(self, updates: list[RequestUpdate]) -> None:
        self.updates += updates
        if any(update.finish_reason is not None for update in updates):
            self.has_ended.set()

    @property
    def token_ids(self) -> list[int]:
        return [token for update in self.updates for token in update.new_token_ids]


def add_request(max_tokens: int) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0)
    return AddRequest(request_id="same", group_id="same", prompt_token_ids=PROMPT, params=params, arrival_s=0.0)


def test_an_id_that_one_front_gives_up_and_another_takes_in_the_same_turn_is_two_requests() -> None:
    built = make_roomy_engine(gate_open=False)
    one, other = Outbox(), Outbox()
    built.loop.submit(add_request(200), one)
    assert built.runner.waiting.wait(60.0)
    built.loop.submit(AbortRequest("same"), one)
    built.loop.submit(add_request(6), other)
    built.runner.gate.set()
    assert one.has_ended.wait(60.0)
    assert other.has_ended.wait(60.0)
    assert one.updates[-1].status == "aborted"
    assert (other.updates[-1].status, other.token_ids) == ("completed", expected_tokens(PROMPT, 6))
    built.engine.close_sync()


def test_a_front_cannot_end_the_request_of_another() -> None:
    built = make_roomy_engine(gate_open=False)
    one, other = Outbox(), Outbox()
    built.loop.submit(add_request(6), one)
    built.loop.submit(add_request(6), other)
    built.loop.submit(AbortRequest("same"), other)
    built.runner.gate.set()
    assert one.has_ended.wait(60.0)
    assert (one.updates[-1].status, one.token_ids) == ("completed", expected_tokens(PROMPT, 6))
    assert [update.status for update in other.updates] == ["rejected"]
    assert isinstance(other.updates[0].error, InvalidRequestError)
    built.engine.close_sync()


def test_choices_that_could_not_be_sent_do_not_keep_the_id() -> None:
    built = make_roomy_engine()
    front, sent = built.engine.front, front_sends(built)

    with pytest.raises(ZeroDivisionError):
        list(built.engine.generate_sync(PROMPT, LONG.replace(n=3), "r"))
    assert [type(message).__name__ for message in sent] == ["AddRequest", "AbortRequest"]
    assert front.drain(60.0)
    assert front.num_open == 0
    built.engine.close_sync()


def front_sends(built: Built) -> list[object]:
    """The second AddRequest from now on cannot be sent."""
    front, sent, send = built.engine.front, list[object](), built.engine.front._send

    def break_at_the_second(message: object) -> None:
        if isinstance(message, AddRequest) and message.choice_index == 1:
            raise ZeroDivisionError
        sent.append(message)
        send(message)  # type: ignore[arg-type]

    front._send = break_at_the_second
    return sent


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"request_id": 5}, "request_id"),
        ({"request_id": ["r"]}, "request_id"),
        ({"priority": "high"}, "priority"),
        ({"priority": True}, "priority"),
        ({"tenant": 5}, "tenant"),
        ({"cache_salt": b"x"}, "cache_salt"),
        ({"context": RequestContext(tenant="a"), "cache_salt": "b"}, "context"),
    ],
    ids=str,
)
def test_wrong_facts_about_a_request_are_refused_and_the_engine_lives(options: dict[str, object], param: str) -> None:
    built = make_roomy_engine(scheduling_policy="priority")

    async def main() -> None:
        with pytest.raises(InvalidRequestError, match=param) as caught:
            async for _ in built.engine.generate(PROMPT, SHORT, **options):  # type: ignore[arg-type]
                pass
        assert caught.value.param == param
        assert (await collect(built))[-1].status == "completed"

    asyncio.run(main())
    built.engine.close_sync()
