"""Which prompt tokens are kept for an explanation, and for how long."""

from __future__ import annotations

from dataclasses import replace

from pagedcore.console.excerpts import NUM_FINISHED_KEPT, NUM_HEAD_TOKENS, NUM_TOKENS_AROUND, Excerpts
from pagedcore.core.events import Admitted, Arrived, Event, StepEvents
from pagedcore.messages import AddRequest
from support.observed import make_add, make_finished, make_lookup


def record(excerpts: Excerpts, *events: Event) -> None:
    excerpts.record(StepEvents(now_s=0.0, events=list(events)))


def serve(excerpts: Excerpts, request: AddRequest) -> None:
    lookup = make_lookup("x", "y")
    record(excerpts, Arrived(request, 0.0), Admitted(request.request_id, 0.0, lookup), make_finished(request, 0.0))


def test_tokens_around_the_divergence_and_at_the_head_are_kept_and_no_others() -> None:
    excerpts, request = Excerpts(), make_add("a", num_tokens=120, tenant="t")
    lookup = make_lookup("x", "y", pool=10, sibling=3)
    record(excerpts, Arrived(request, 0.0), Admitted("a", 0.0, lookup))
    kept = excerpts.find("a")
    assert kept is not None
    assert (kept.tenant, kept.head) == ("t", tuple(range(NUM_HEAD_TOKENS)))
    left_at = 10 * 4 + 3
    assert kept.before == tuple(range(left_at - NUM_TOKENS_AROUND, left_at))
    assert kept.after == tuple(range(left_at, left_at + NUM_TOKENS_AROUND))


def test_a_prompt_that_leaves_at_its_first_token_has_nothing_before() -> None:
    excerpts = Excerpts()
    serve(excerpts, make_add("a", num_tokens=9))
    kept = excerpts.find("a")
    assert kept is not None
    assert (kept.before, kept.after) == ((), tuple(range(9)))


def test_the_last_ended_requests_are_remembered_and_older_ones_forgotten() -> None:
    excerpts = Excerpts()
    for number in range(NUM_FINISHED_KEPT + 1):
        serve(excerpts, make_add(f"r{number}"))
    assert excerpts.find("r0") is None
    assert excerpts.find("r1") is not None
    assert excerpts._open == excerpts._running == {}


def test_a_request_that_was_never_looked_up_is_not_known() -> None:
    excerpts, request = Excerpts(), make_add("a")
    record(excerpts, Arrived(request, 0.0), make_finished(request, 0.0, status="aborted"))
    record(excerpts, Admitted("unseen", 0.0, make_lookup("x")), Admitted("a", 0.0, None))
    assert excerpts.find("a") is excerpts.find("unseen") is None


def test_a_retry_that_was_never_looked_up_is_not_explained_by_the_first_try() -> None:
    excerpts, retry = Excerpts(), make_add("a")
    serve(excerpts, make_add("a"))
    record(excerpts, Arrived(retry, 0.0))
    assert excerpts.find("a") is None
    record(excerpts, make_finished(retry, 0.0, status="aborted"))
    assert excerpts.find("a") is None


def test_the_end_of_a_refused_duplicate_does_not_end_the_open_request() -> None:
    excerpts, request = Excerpts(), make_add("a", tenant="t")
    record(excerpts, Arrived(request, 0.0), Admitted("a", 0.0, make_lookup("x", "y")))
    duplicate = replace(request, tenant="other")
    record(excerpts, Arrived(duplicate, 0.0), make_finished(duplicate, 0.0, status="rejected"))
    kept = excerpts.find("a")
    assert kept is not None
    assert kept.tenant == "t"
    assert "a" in excerpts._running
