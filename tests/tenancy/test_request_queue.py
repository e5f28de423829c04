"""The order of service."""

from __future__ import annotations

import pytest

from pagedcore.core.request import Request
from pagedcore.tenancy.request_queue import RequestQueue
from support.core_builders import make_request


def make(name: str, priority: int, arrival: int) -> Request:
    return Request(add_request=make_request(name, [1]), max_total_tokens=9, order_key=(priority, arrival))


def names(queue: RequestQueue[Request]) -> list[str]:
    return [request.request_id for request in queue]


def test_requests_stand_by_class_and_then_by_arrival() -> None:
    queue = RequestQueue[Request]()
    for request in (make("c", 1, 0), make("a", 0, 1), make("d", 1, 2), make("b", 0, 3)):
        queue.add(request)
    assert names(queue) == ["a", "b", "c", "d"]
    assert [queue.num_behind_class(priority) for priority in (-1, 0, 1)] == [4, 2, 0]
    queue.check_invariants()


def test_a_request_that_comes_back_takes_its_old_place() -> None:
    queue = RequestQueue[Request]()
    requests = [make(name, 0, index) for index, name in enumerate("abc")]
    for request in requests:
        queue.add(request)
    queue.remove(requests[1])
    assert names(queue) == ["a", "c"]
    queue.add(requests[1])
    assert names(queue) == ["a", "b", "c"]


def test_removing_what_is_not_there_is_our_own_fault() -> None:
    queue = RequestQueue[Request]()
    queue.add(make("a", 0, 0))
    with pytest.raises(AssertionError, match="not at its place"):
        queue.remove(make("a", 0, 0))


def test_a_snapshot_is_not_changed_by_later_removals() -> None:
    queue = RequestQueue[Request]()
    requests = [make(name, 0, index) for index, name in enumerate("abc")]
    for request in requests:
        queue.add(request)
    snapshot = queue.snapshot(2)
    queue.remove(requests[0])
    assert snapshot == requests[:2]
