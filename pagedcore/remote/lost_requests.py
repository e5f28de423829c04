"""Requests that an engine's process took with it when it died: counted here, exactly once, since nobody else can."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pagedcore.core.events import Arrived, Finished
from pagedcore.core.request_limits import reject_reason
from pagedcore.errors import RequestError
from pagedcore.messages import AddRequest
from pagedcore.observe.ledger import Ledger, Sink
from pagedcore.observe.lookups import LookupBook
from pagedcore.observe.requests import RequestBook
from pagedcore.remote.open_requests import OpenRequest

LOST = "~lost"
"""Behind the id of a request that is counted when its engine is gone: a new one of that id is another one."""


class Uncounted:
    """Owns the choices that a front has handed to its own engine and whose end is in no numbers that came back. Thread-safe.

    An engine's numbers come some time after the updates that they belong to, so a choice may have ended for its caller and still
    be here.
    """

    def __init__(self) -> None:
        self._choices: dict[str, list[OpenRequest]] = {}
        """By id, in the order in which they had it."""
        self._lock = threading.Lock()

    def open(self, choice: OpenRequest) -> None:
        """Before the engine hears of it."""
        with self._lock:
            self._choices.setdefault(choice.request.request_id, []).append(choice)

    def note_ended(self, ended: Iterable[tuple[str, bool]]) -> None:
        """What `Numbers.ended` says. Where a request is counted, and that is with its first rejected choice, its others are nobody's."""
        with self._lock:
            for request_id, is_request_counted in ended:
                choice = self._choices.get(request_id, [None])[0]
                if choice is None:
                    continue
                self._remove(choice)
                if is_request_counted:
                    for other in self._others_of(choice):
                        self._remove(other)

    def take(self) -> list[OpenRequest]:
        """All of them, in the order of their arrival; none is here any more."""
        with self._lock:
            choices, self._choices = self._choices, {}
        return sorted((choice for same_id in choices.values() for choice in same_id), key=lambda choice: choice.request.arrival_s)

    def _others_of(self, choice: OpenRequest) -> list[OpenRequest]:
        group_id, count = choice.request.group_id, choice.request.num_choices
        ids = [group_id, *(f"{group_id}#{index}" for index in range(1, count))] if count > 1 else []
        same_id = [self._choices[one] for one in ids if one in self._choices]
        return [choices[0] for choices in same_id if _caller(choices[0]) == _caller(choice)]

    def _remove(self, choice: OpenRequest) -> None:
        choices = self._choices[choice.request.request_id]
        choices.remove(choice)
        if not choices:
            del self._choices[choice.request.request_id]


class LostBook:
    """Owns the books in which lost requests end: the same ones as in an engine, with its rules for choices and labels."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._requests = RequestBook(ledger, LookupBook(ledger, num_blocks=0))

    def count(self, ends: Iterable[Finished], num_prompt_tokens: int, sink: Sink) -> None:
        """Write these ends down, and hand the sink what that adds up to.

        `num_prompt_tokens` are those looked up whose fate the engine had not told: how far they were computed nobody knows, so
        they count as abandoned.
        """
        self._ledger.add("pagedcore_abandoned_prompt_tokens_total", num_prompt_tokens)
        for end in ends:
            self._requests.arrived(Arrived(end.request, end.now_s))
            self._requests.finished(end)
        self._requests.just_counted.clear()
        self._ledger.export(sink)

    def received(self, request: AddRequest, sink: Sink) -> None:
        """Write down that a request was handed to the engine."""
        sink.add(self._requests.received_key(request), 1)


def lost_ends(choices: Sequence[OpenRequest], now_s: float) -> list[Finished]:
    """How each choice ended as far as its caller heard, by an error where it did not.

    They are all that is left of their requests: other choices are in the books already. So their requests have ids of their own.
    """
    left = Counter(map(_caller, choices))
    return [_end(choice, left[_caller(choice)], now_s) for choice in choices]


def _end(choice: OpenRequest, num_choices: int, now_s: float) -> Finished:
    request, last = choice.request, choice.last
    request = replace(request, request_id=request.request_id + LOST, group_id=request.group_id + LOST, num_choices=num_choices)
    if last is None:
        return Finished(request, now_s, "error", "error", num_output_tokens=choice.num_tokens)
    reason = reject_reason(last.error) if last.status == "rejected" and isinstance(last.error, RequestError) else None
    return Finished(request, now_s, last.status, last.finish_reason, reason, num_output_tokens=choice.num_tokens)


def _caller(choice: OpenRequest) -> tuple[str, float]:
    """Equal for the choices of one request, and another one when its id is used again."""
    return choice.request.group_id, choice.request.arrival_s
