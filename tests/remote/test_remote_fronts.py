"""Fronts that leave, or misbehave: their requests end, and nobody else notices."""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading

import pytest

from pagedcore import AsyncEngine, SamplingParams
from pagedcore.errors import EngineClosedError, EngineRefusedError, EngineUnreachableError
from pagedcore.garbage import GarbageHold
from pagedcore.outputs import RequestOutput
from pagedcore.remote import connection, frames, server
from pagedcore.remote.address import connect_to
from pagedcore.remote.channel import Channel
from pagedcore.remote.frames import Add, Call
from pagedcore.remote.link import Link
from support.core_builders import make_request
from support.engine_builder import expected_tokens
from support.remote_engines import ENDLESS, GREEDY, Hosted, connected, greeted, raw_front, run, wait_for


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
        thread.join(60.0)
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


def test_a_front_holds_no_garbage_back(one: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[GarbageHold] = []
    monkeypatch.setattr(GarbageHold, "take", held.append)
    with connected(one) as front:
        run(front, [1])
        assert not held


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
    with pytest.raises(EngineRefusedError, match="run the same version on both sides"):
        AsyncEngine.connect(one.path, timeout_s=60)


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
    with pytest.raises(EngineRefusedError, match="another user's"):
        one.connect()
    assert f"A process of user {os.getuid() + 7} was refused" in caplog.text


def test_large_frames_pass_and_absurd_lengths_do_not(one: Hosted) -> None:
    with connected(one) as front:
        last = run(front, [1, 2], request_id="x" * 3_000_000)
        assert len(last.request_id) == 3_000_000
    sock = connect_to(one.path)
    sock.sendall(b"\xff\xff\xff\xff")
    sock.settimeout(20.0)
    assert sock.recv(100) == b"", "cut off at once, not after four gigabytes"
    sock.close()


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


@pytest.mark.parametrize("first", [b"\xc1", frames.encode(Call(0, "stats", {}))], ids=["no message", "no welcome"])
def test_what_is_no_engine_is_said_to_be_none(first: bytes) -> None:
    ours, theirs = socket.socketpair()
    impostor = Channel(theirs, iter, name="impostor")
    impostor.put(first)
    with pytest.raises(EngineUnreachableError, match="What answers there is no engine"):
        Link(ours, timeout_s=10.0)
    impostor.close()


def test_a_front_that_was_closed_while_the_engine_came_back_lets_that_one_go(one: Hosted) -> None:
    with connected(one) as front:
        loop = front.loop
        source, reopen = loop._source, loop._source.reopen
        is_back, may_go_on = threading.Event(), threading.Event()

        def slowly(stop: threading.Event) -> Link | None:
            link = reopen(threading.Event())
            is_back.set()
            assert may_go_on.wait(60.0)
            return link

        source.reopen = slowly
        loop._link.abort()
        assert is_back.wait(60.0)
        closing = threading.Thread(target=front.close_sync)
        closing.start()
        assert loop._stop.wait(60.0)
        may_go_on.set()
        closing.join(60.0)
        loop._thread.join(60.0)
        assert not loop._thread.is_alive()
        assert loop._link is None
        assert not loop.is_linked
        wait_for(lambda: one.server.num_fronts == 0, "the front is gone")
