"""Who waits, who runs, and what each tenant had in the last minute, by hand."""

from __future__ import annotations

from typing import Any

from pagedcore.console.tenants import TenantBook
from pagedcore.core.events import Admitted, Arrived, Event, FirstToken, Preempted, Resumed, StepEvents
from pagedcore.messages import AddRequest
from pagedcore.observe.labels import MAX_TENANTS
from support.observed import FakeClock, make_add, make_finished


def add(name: str, tenant: str | None, *, arrival_s: float = 1000.0, **fields: Any) -> AddRequest:
    return make_add(name, num_tokens=10, tenant=tenant, arrival_s=arrival_s, **fields)


def make_book(*events: Event) -> tuple[TenantBook, FakeClock]:
    clock = FakeClock(1000.0)
    book = TenantBook(clock)
    tell(book, *events)
    return book, clock


def tell(book: TenantBook, *events: Event) -> None:
    book.record(StepEvents(now_s=1000.0, events=list(events)))


def counts(book: TenantBook) -> dict[str, tuple[int, int]]:
    """Tenant -> (waiting, running)."""
    return {row["tenant"]: (row["num_waiting"], row["num_running"]) for row in book.summary()}


def test_a_request_waits_runs_waits_again_after_a_preemption_and_is_gone_when_it_ends() -> None:
    red = add("a", "red")
    book, _ = make_book(Arrived(red, 1000.0))
    assert counts(book) == {"red": (1, 0)}
    tell(book, Admitted("a", 1000.1, None))
    assert counts(book) == {"red": (0, 1)}
    tell(book, Preempted("a", 1000.2, num_lost_tokens=3, usage_before=1.0, usage_after=0.5))
    assert counts(book) == {"red": (1, 0)}
    tell(book, Resumed("a", 1000.3, num_recomputed_tokens=3))
    assert counts(book) == {"red": (0, 1)}
    tell(book, make_finished(red, 1000.4))
    assert counts(book) == {"red": (0, 0)}
    assert book._open == {}


def test_one_that_ends_while_it_waits_leaves_no_count_behind() -> None:
    red = add("a", "red")
    book, _ = make_book(Arrived(red, 1000.0), make_finished(red, 1000.1, status="aborted"))
    assert counts(book) == {}


def test_a_refused_duplicate_changes_nothing() -> None:
    first, duplicate = add("a", "red"), add("a", "blue")
    book, _ = make_book(Arrived(first, 1000.0), Arrived(duplicate, 1000.1), make_finished(duplicate, 1000.1, status="rejected"))
    assert counts(book) == {"red": (1, 0)}


def test_tokens_and_first_tokens_are_those_of_the_last_minute_and_a_prompt_of_n_choices_counts_once() -> None:
    first, second = add("a", "red", num_choices=2), add("a#1", "red", group="a", choice_index=1, num_choices=2)
    book, clock = make_book(
        Arrived(first, 1000.0), Arrived(second, 1000.0), Admitted("a", 1000.5, None), Admitted("a#1", 1000.5, None),
        FirstToken("a", 1002.0), FirstToken("a#1", 1003.0), make_finished(first, 1004.0, num_output_tokens=5),
        make_finished(second, 1004.0, num_output_tokens=7),
    )  # fmt: skip
    (row,) = book.summary()
    assert (row["prompt_tokens"], row["output_tokens"], row["ttft_p50_s"], row["ttft_p99_s"]) == (10, 12, 2.0, 2.0)
    clock.now_s = 1063.9
    (row,) = book.summary()
    assert (row["prompt_tokens"], row["output_tokens"], row["ttft_p50_s"]) == (0, 12, None)
    clock.now_s = 1064.0
    assert book.summary() == []


def test_who_has_most_open_requests_comes_first_and_nobody_is_a_tenant_too() -> None:
    book, _ = make_book(*(Arrived(add(f"{name}-{n}", name), 1000.0) for name, count in (("red", 1), ("blue", 3)) for n in range(count)))
    tell(book, Arrived(add("x", None, priority=4), 1000.0), Arrived(add("y", None, priority=5), 1000.0))
    assert [(row["tenant"], row["priority"]) for row in book.summary()] == [("blue", 0), ("", 5), ("red", 0)]


def test_tenants_past_the_bound_are_one_as_in_the_metrics() -> None:
    book, _ = make_book(*(Arrived(add(f"r{n}", f"tenant {n}"), 1000.0) for n in range(MAX_TENANTS + 2)))
    found = counts(book)
    assert (len(found), found["other"]) == (MAX_TENANTS + 1, (2, 0))
