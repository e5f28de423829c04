"""Requests in the order in which they are served."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterator
from operator import attrgetter
from typing import Generic, Protocol, TypeVar


class Queued(Hashable, Protocol):
    """A request, as far as its place is concerned."""

    request_id: str
    tenant: str
    order_key: tuple[int, int]
    """(priority, arrival number)."""


R = TypeVar("R", bound=Queued)
_order_key = attrgetter("order_key")


class RequestQueue(Generic[R]):
    """Owns an ordered set of requests: by priority class, then by arrival. A request that comes back takes its old place."""

    def __init__(self) -> None:
        self._requests: list[R] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[R]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> R:
        return self._requests[index]

    def __reversed__(self) -> Iterator[R]:
        return reversed(self._requests)

    def snapshot(self, max_requests: int) -> list[R]:
        """The first requests, as they are now."""
        return self._requests[:max_requests]

    def add(self, request: R) -> None:
        """Put a request at its place."""
        insort(self._requests, request, key=_order_key)

    def remove(self, request: R) -> None:
        """Take a request out; it must be there."""
        index = bisect_left(self._requests, request.order_key, key=_order_key)
        assert self._requests[index] is request, f"request {request.request_id!r} is not at its place in the queue"
        del self._requests[index]

    def num_behind_class(self, priority: int) -> int:
        """Requests of later priority classes than this one."""
        return len(self._requests) - bisect_right(self._requests, priority, key=lambda request: request.order_key[0])

    def check_invariants(self) -> None:
        """Raises AssertionError when the order is broken."""
        keys = [request.order_key for request in self._requests]
        assert keys == sorted(set(keys)), "the queue is out of order or holds a request twice"
