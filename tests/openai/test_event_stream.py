"""Work lives as long as its client, and a stream goes no faster than its client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from pagedcore.http.event_stream import EventStream, until_disconnect

pytestmark = pytest.mark.asyncio

Receive = Callable[[], Awaitable[dict[str, Any]]]


class Client:
    """The other end: leaves when it is told to, and says how often somebody listened for it."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = list(messages)
        self.has_left = asyncio.Event()
        self.num_listening = 0

    async def receive(self) -> dict[str, Any]:
        if self.messages:
            return self.messages.pop(0)
        self.num_listening += 1
        try:
            await self.has_left.wait()
        finally:
            self.num_listening -= 1
        return {"type": "http.disconnect"}


class Work:
    """Waits for `go`, then has a result; says how it ended, for which it takes its time."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.ended = ""

    async def run(self) -> str:
        try:
            self.has_begun.set()
            await self.go.wait()
            self.ended = "done"
            return "result"
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # as closing generators does
            self.ended = "cancelled"
            raise


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_result_of_work_comes_through_and_nobody_listens_any_more() -> None:
    client, work = Client({"type": "http.request", "body": b""}), Work()
    work.go.set()
    assert await until_disconnect(client.receive, work.run()) == "result"
    await settle()
    assert client.num_listening == 0
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("in_task", [False, True])
async def test_a_client_that_leaves_cancels_the_work_which_has_ended_then(in_task: bool) -> None:
    client, work = Client(), Work()

    async def main() -> tuple[str, int]:
        with pytest.raises(ClientDisconnect):
            await until_disconnect(client.receive, asyncio.ensure_future(work.run()) if in_task else work.run())
        ended = work.ended
        await asyncio.sleep(0)  # the task itself goes on
        task = asyncio.current_task()
        assert task is not None
        return ended, task.cancelling()

    task = asyncio.create_task(main())
    await work.has_begun.wait()
    await settle()
    client.has_left.set()
    assert await task == ("cancelled", 0)


async def test_a_client_that_has_left_before_is_noticed_at_once() -> None:
    client, work = Client({"type": "http.disconnect"}), Work()
    with pytest.raises(ClientDisconnect):
        await until_disconnect(client.receive, work.run())


@pytest.mark.parametrize("leaves_too", [False, True])
async def test_who_cancels_from_outside_gets_a_cancellation(leaves_too: bool) -> None:
    client, work = Client(), Work()
    task = asyncio.create_task(until_disconnect(client.receive, work.run()))
    await work.has_begun.wait()
    await settle()
    if leaves_too:
        client.has_left.set()
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended == "cancelled"
    await settle()
    assert client.num_listening == 0


async def test_an_error_of_the_work_comes_through() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    client = Client()
    with pytest.raises(ZeroDivisionError):
        await until_disconnect(client.receive, fail())
    await settle()
    assert client.num_listening == 0


async def test_a_server_that_cannot_be_asked_has_lost_its_client() -> None:
    async def receive() -> dict[str, Any]:
        raise RuntimeError("the connection is gone")

    work = Work()
    with pytest.raises(ClientDisconnect):
        await until_disconnect(receive, work.run())
    assert work.ended == "cancelled"


class Events:
    """A generator of events that says how far it is, and whether it was closed."""

    def __init__(self, count: int) -> None:
        self.num_given = 0
        self.is_closed = False
        self._count = count

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(self._count):
                self.num_given += 1
                yield b"data: %d\n\n" % number
        finally:
            self.is_closed = True


async def test_a_stream_goes_no_faster_than_its_client_reads() -> None:
    client, events, may_send = Client(), Events(20), asyncio.Semaphore(0)
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        await may_send.acquire()
        sent.append(message)

    stream = asyncio.create_task(EventStream(events())({"type": "http"}, client.receive, send))
    for reads in range(1, 6):
        may_send.release()
        await settle()
        assert (len(sent), events.num_given) == (reads, reads)
    client.has_left.set()
    await stream
    assert events.is_closed
    assert events.num_given == 5


async def test_a_stream_to_its_end_is_a_start_all_events_and_an_end() -> None:
    client, events, sent = Client(), Events(2), list[dict[str, Any]]()

    async def send(message: Any) -> None:
        sent.append(message)

    await EventStream(events())({"type": "http"}, client.receive, send)
    assert [message["type"] for message in sent] == ["http.response.start"] + ["http.response.body"] * 3
    assert [message.get("body") for message in sent[1:]] == [b"data: 0\n\n", b"data: 1\n\n", b""]
    assert [message.get("more_body") for message in sent[1:]] == [True, True, False]
    assert events.is_closed
    await settle()
    assert len(asyncio.all_tasks()) == 1


async def test_a_client_that_leaves_as_the_work_ends_cancels_nothing_that_comes_later() -> None:
    """Servers say so, too, when an answer is complete."""
    client, events = Client(), Events(2)

    async def send(message: Any) -> None:
        if message.get("more_body") is False:
            client.has_left.set()

    await EventStream(events())({"type": "http"}, client.receive, send)
    await settle()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
