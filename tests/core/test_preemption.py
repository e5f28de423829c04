"""Preemption by recompute: who gives way, when it comes back, how often. Blocks hold 4 tokens."""

from __future__ import annotations

import pytest

from pagedcore.core.events import Admitted, Finished, Preempted, Resumed
from support.core_builders import Driver
from support.fake_runner import next_token


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def make_crowd(**changes: object) -> Driver:
    """Three requests of 4 prompt and 12 output tokens in 6 blocks: each wants 4 (15 computed tokens), so all cannot stay."""
    driver = Driver.make(**{"num_blocks": 6, "max_num_seqs": 3, "enable_prefix_caching": False, **changes})
    for index, name in enumerate("abc"):
        driver.add(name, [index] * 4, max_tokens=12)
    return driver


def test_the_latest_request_gives_way() -> None:
    driver = make_crowd()
    driver.run()
    first = driver.events_of(Preempted)[0]
    # all hold 2 blocks at 8 computed tokens; a needs a third for position 8
    assert (first.request_id, first.num_lost_tokens, first.usage_before, first.usage_after) == ("c", 8, 1.0, pytest.approx(4 / 6))
    for index, name in enumerate("abc"):
        assert driver.tokens[name] == alone([index] * 4, 12)


def test_under_priority_the_least_urgent_gives_way_even_if_it_came_first() -> None:
    driver = Driver.make(num_blocks=4, max_num_seqs=2, enable_prefix_caching=False, scheduling_policy="priority")
    driver.add("urgent not", [0] * 4, max_tokens=9, priority=5)
    driver.add("urgent", [1] * 4, max_tokens=9, priority=0)
    driver.run()
    assert {event.request_id for event in driver.events_of(Preempted)} == {"urgent not"}


def test_a_preempted_request_resumes_before_later_arrivals() -> None:
    driver = make_crowd()
    driver.add("d", [3], max_tokens=1)  # one block, which is free long before c's context fits
    driver.run()
    order = [(type(event).__name__, event.request_id) for event in driver.events if isinstance(event, (Admitted, Resumed))]
    assert order.index(("Resumed", "c")) < order.index(("Admitted", "d"))


def resumed_ids(driver: Driver) -> list[str]:
    return [event.request_id for event in driver.events_of(Resumed)]


def test_it_resumes_only_when_its_whole_known_context_fits() -> None:
    driver = make_crowd()
    while len(driver.events_of(Preempted)) < 2:
        driver.turn()
    # c went with 8 computed tokens, then b with 12: b knows 13 tokens, which need 4 blocks, and goes first
    assert [(event.request_id, event.num_lost_tokens) for event in driver.events_of(Preempted)] == [("c", 8), ("b", 12)]
    while not resumed_ids(driver):
        assert driver.counts().num_free_blocks < 4 or driver.counts().num_running == 0
        assert driver.scheduler.waiting_reason("b") == driver.scheduler.waiting_reason("c") == "blocks"
        driver.turn()
    assert resumed_ids(driver) == ["b"]
    assert len(driver.tables[driver.scheduler._state.requests["b"].row]) == 4


def test_preemptions_are_bounded_and_then_the_whole_length_is_reserved() -> None:
    driver = make_crowd(max_preemptions=1, num_blocks=5)
    driver.run()
    finished = {event.request.request_id: event for event in driver.events_of(Finished)}
    assert max(event.num_preemptions for event in finished.values()) == 1
    assert finished["c"].num_preemptions == 1
    for index, name in enumerate("abc"):
        assert driver.tokens[name] == alone([index] * 4, 12)


def test_a_protected_request_holds_its_final_length_from_its_return() -> None:
    driver = make_crowd(max_preemptions=1)
    while "c" not in resumed_ids(driver):
        driver.turn()
    request = driver.scheduler._state.requests["c"]
    assert request.is_protected
    assert len(request.block_ids) == 4  # for the 15 tokens it will compute, not the 9 it knows


def test_a_preemption_moves_no_prompt_token_between_hits_and_computed() -> None:
    driver = make_crowd(enable_prefix_caching=True)
    driver.run()
    assert driver.last["c"].num_preemptions > 0
    for name in "abc":
        report = driver.last[name].cache
        assert report is not None
        assert (report.computed_tokens, report.num_cached_tokens, report.abandoned_tokens) == (4, 0, 0)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_recomputed_tokens_are_what_the_device_computed_twice(enable_prefix_caching: bool) -> None:
    driver = make_crowd(enable_prefix_caching=enable_prefix_caching)
    driver.run()
    positions = driver.runner.computed_positions
    twice = sum(len(computed) - len(set(computed)) for computed in positions.values())
    assert twice == sum(event.num_recomputed_tokens for event in driver.events_of(Resumed)) > 0


def test_resume_takes_back_what_the_cache_kept() -> None:
    driver = Driver.make(num_blocks=5, max_num_seqs=2)
    driver.add("a", [0] * 4, max_tokens=9)  # 12 computed tokens, 3 blocks
    driver.add("b", [1] * 4, max_tokens=9)
    driver.run()
    # at 8 computed tokens each holds 2 blocks and a takes the fifth; b goes, and its 2 hashed blocks stay in the pool
    (preempted,), (resumed,) = driver.events_of(Preempted), driver.events_of(Resumed)
    assert (preempted.request_id, preempted.num_lost_tokens) == ("b", 8)
    assert (resumed.request_id, resumed.num_recomputed_tokens) == ("b", 0)
    assert driver.runner.computed_positions["b"] == list(range(12))


def test_acquisitions_of_a_resume_are_not_counted_again() -> None:
    driver = make_crowd()
    driver.run()
    assert driver.events_of(Resumed)
    assert sum(step.num_fresh_acquisitions for step in driver.steps) == 3 * 4


def test_with_overlap_the_pending_token_of_a_preempted_request_is_not_lost() -> None:
    driver = make_crowd(num_in_flight_steps=2)
    driver.run()
    assert driver.events_of(Preempted)
    assert driver.counts().num_deferred_frees > 0
    assert driver.counts().num_stalls > 0
    for index, name in enumerate("abc"):
        assert driver.tokens[name] == alone([index] * 4, 12)


def test_every_schedule_advances_or_preempts_when_the_pool_is_full() -> None:
    driver = make_crowd()
    while driver.scheduler.has_work:
        num_events = len(driver.events_of(Preempted))
        assert driver.turn() is not None or len(driver.events_of(Preempted)) > num_events
