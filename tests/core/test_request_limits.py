"""A request that can never be served is refused when it is added, with nothing queued."""

from __future__ import annotations

import pytest

from pagedcore.core.events import Arrived, Finished
from pagedcore.core.scheduler import Scheduler
from pagedcore.errors import InvalidRequestError, PoolTooSmallError, PromptTooLongError, QueueFullError, RequestError
from pagedcore.messages import AddRequest
from support.core_builders import counts_of, make_limits, make_request


def refuse(scheduler: Scheduler, request: AddRequest) -> tuple[RequestError, Finished]:
    """Add a request that must be refused; returns the error and the terminal event."""
    before = counts_of(scheduler)
    scheduler.take_events()
    with pytest.raises(RequestError) as caught:
        scheduler.add(request, 3.0)
    assert counts_of(scheduler) == before
    assert scheduler.take_updates() == []
    arrived, finished = scheduler.take_events().events
    assert arrived == Arrived(request, 3.0)
    assert isinstance(finished, Finished)
    assert (finished.request, finished.status, finished.now_s) == (request, "rejected", 3.0)
    return caught.value, finished


def test_prompt_and_max_tokens_are_judged_together_against_max_model_len() -> None:
    scheduler = Scheduler(make_limits(max_model_len=10))
    scheduler.add(make_request("fits", [1] * 6, max_tokens=4), 0.0)
    error, finished = refuse(scheduler, make_request("r", [1] * 7, max_tokens=4))
    assert type(error) is PromptTooLongError
    assert finished.reject_reason == "too_long"
    assert error.param == "max_tokens"
    assert "7 tokens and max_tokens is 4, together 11, and max_model_len is 10" in str(error)


def test_a_prompt_that_fills_max_model_len_alone_is_what_is_wrong() -> None:
    with pytest.raises(PromptTooLongError) as caught:
        Scheduler(make_limits(max_model_len=10)).check(10, 1)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("num_tokens", "said"), [(10, "has 10 tokens and max_model_len is 10"), (11, "has 11 tokens or more and max_model_len is 10")]
)
def test_a_prompt_beyond_the_limit_may_have_more_tokens_than_were_read(num_tokens: int, said: str) -> None:
    with pytest.raises(PromptTooLongError, match=said):
        Scheduler(make_limits(max_model_len=10)).check(num_tokens, None)


def test_unset_max_tokens_is_what_max_model_len_leaves() -> None:
    scheduler = Scheduler(make_limits(max_model_len=10))
    scheduler.check(9, None)
    error, finished = refuse(scheduler, make_request("r", [1] * 10, max_tokens=None))
    assert type(error) is PromptTooLongError
    assert finished.reject_reason == "too_long"


def test_the_pool_must_hold_every_token_but_the_last() -> None:
    scheduler = Scheduler(make_limits(num_blocks=2, block_size=4, max_model_len=64))
    scheduler.check(5, 4)
    error, finished = refuse(scheduler, make_request("r", [1] * 5, max_tokens=5))
    assert type(error) is PoolTooSmallError
    assert finished.reject_reason == "pool_too_small"
    assert "need 3 KV blocks of 4 tokens, and the pool has 2" in str(error)


def test_an_empty_prompt_is_invalid() -> None:
    error, finished = refuse(Scheduler(make_limits()), make_request("r", []))
    assert type(error) is InvalidRequestError
    assert finished.reject_reason == "invalid"


@pytest.mark.parametrize("token_id", [-1, 2**31])
def test_ids_that_are_no_int32_are_invalid(token_id: int) -> None:
    error, _ = refuse(Scheduler(make_limits()), make_request("r", [1, token_id]))
    assert type(error) is InvalidRequestError
    assert str(token_id) in str(error)


def test_an_id_in_use_is_refused_and_the_first_request_goes_on() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add(make_request("r", [1]), 0.0)
    error, finished = refuse(scheduler, make_request("r", [2]))
    assert type(error) is InvalidRequestError
    assert finished.reject_reason == "invalid"
    assert scheduler.schedule(1.0) is not None


def test_the_queue_takes_max_waiting_requests() -> None:
    scheduler = Scheduler(make_limits(max_waiting_requests=2, max_num_seqs=1))
    scheduler.add(make_request("running", [1]), 0.0)
    scheduler.schedule(0.0)
    for name in ("a", "b"):
        scheduler.add(make_request(name, [1]), 0.0)
    error, finished = refuse(scheduler, make_request("c", [1]))
    assert isinstance(error, QueueFullError)
    assert finished.reject_reason == "queue_full"
    scheduler.abort("running", 1.0)
    scheduler.schedule(1.0)
    scheduler.add(make_request("c", [1]), 1.0)


def test_a_burst_into_free_rows_does_not_fill_the_queue() -> None:
    scheduler = Scheduler(make_limits(max_waiting_requests=1, max_num_seqs=3))
    for index in range(3 + 1):
        scheduler.add(make_request(f"r{index}", [1]), 0.0)
    error, _ = refuse(scheduler, make_request("r4", [1]))
    assert isinstance(error, QueueFullError)


def test_requests_that_a_plan_left_waiting_fill_the_queue_even_with_free_rows() -> None:
    scheduler = Scheduler(make_limits(max_waiting_requests=1, max_num_seqs=3, num_blocks=4))
    scheduler.add(make_request("big", range(12)), 0.0)
    scheduler.add(make_request("held up", range(100, 112)), 0.0)
    scheduler.schedule(0.0)
    assert (counts_of(scheduler).num_running, counts_of(scheduler).num_waiting) == (1, 1)
    error, _ = refuse(scheduler, make_request("new", [1]))
    assert isinstance(error, QueueFullError)


def test_check_raises_the_same_errors_and_changes_nothing() -> None:
    scheduler = Scheduler(make_limits(num_blocks=2, max_model_len=20))
    with pytest.raises(PromptTooLongError):
        scheduler.check(20, 1)
    with pytest.raises(PoolTooSmallError):
        scheduler.check(8, 4)
    with pytest.raises(InvalidRequestError):
        scheduler.check(0, 4)
    assert scheduler.take_events().events == []
    assert not scheduler.has_work
