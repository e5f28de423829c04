"""What waits for the engine thread: who puts something in waits for nobody longer than need be, and all of it is given back once."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from pagedcore.errors import EngineClosedError
from pagedcore.inbox import Inbox
from pagedcore.messages import AbortRequest, AddRequest, RequestUpdate
from support.core_builders import make_request

CLOSED = EngineClosedError("closed")


def nobody(_: list[RequestUpdate]) -> None:
    """An outbox."""


def test_an_abort_waits_for_no_request_that_is_being_put_in() -> None:
    is_receiving, may_go_on = threading.Event(), threading.Event()

    def receive(request: AddRequest) -> AddRequest:
        is_receiving.set()
        assert may_go_on.wait(60)
        return request

    inbox = Inbox(receive)
    with ThreadPoolExecutor(2) as pool:
        try:
            adding = pool.submit(inbox.put_message, make_request("a", [1]), nobody)
            assert is_receiving.wait(60)
            pool.submit(inbox.put_message, AbortRequest("b"), None).result(20)
        finally:
            may_go_on.set()
        adding.result(60)
    assert [subject.request_id for _, subject, _ in inbox.take(block=False, timeout_s=None)] == ["b", "a"]


def test_what_waits_is_given_back_once_by_however_many_it_is_refused() -> None:
    for _ in range(50):
        inbox, calls = Inbox(), list[Future[None]]()
        for number in range(100):
            inbox.put_message(make_request(f"r{number}", [1]), nobody)
            calls.append(inbox.put_call(lambda: None))
        with ThreadPoolExecutor(4) as pool:
            given_back = [pair for found in pool.map(inbox.refuse, [CLOSED] * 4) for pair in found]
        assert sorted(request.request_id for request, _ in given_back) == sorted(f"r{number}" for number in range(100))
        assert all(isinstance(call.exception(0), EngineClosedError) for call in calls)


def test_the_engine_thread_takes_what_receiving_made_of_a_request() -> None:
    inbox = Inbox(lambda request: replace(request, request_id=request.request_id + "!"))
    inbox.put_message(make_request("a", [1]), nobody)
    inbox.put_fault(make_request("b", [1]), CLOSED, nobody)
    (_, first, _), (_, (second, _), _) = inbox.take(block=False, timeout_s=None)
    assert (first.request_id, second.request_id) == ("a!", "b!")


def test_nothing_is_received_or_put_in_after_a_refusal() -> None:
    received: list[AddRequest] = []

    def receive(request: AddRequest) -> AddRequest:
        received.append(request)
        return request

    inbox = Inbox(receive)
    inbox.refuse(CLOSED)
    for message in (make_request("a", [1]), AbortRequest("a")):
        with pytest.raises(EngineClosedError, match="closed"):
            inbox.put_message(message, nobody)
    assert not received
    assert not list(inbox.take(block=False, timeout_s=None))
