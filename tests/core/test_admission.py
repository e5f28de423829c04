"""Who runs next: budget, rows, blocks, watermark, order. Blocks hold 4 tokens."""

from __future__ import annotations

from collections import Counter

import pytest

from pagedcore.core.admission import MAX_BLOCKED
from pagedcore.core.kv_cache_manager import KVCacheManager, PrefixMatch
from pagedcore.core.request import Request
from pagedcore.core.scheduler import Scheduler
from pagedcore.core.step import StepPlan
from pagedcore.errors import InvalidRequestError
from support.core_builders import Driver, make_limits, make_request


def admitted(plan: StepPlan | None) -> list[str]:
    return [] if plan is None else [row.request_id for row in plan.admitted]


@pytest.mark.parametrize(("num_in_flight_steps", "delay"), [(1, 1), (2, 2)])
def test_a_request_that_arrives_at_step_k_gets_tokens_one_step_later_or_two_with_overlap(num_in_flight_steps: int, delay: int) -> None:
    driver = Driver.make(num_in_flight_steps=num_in_flight_steps)
    driver.add("running", [1, 2, 3], max_tokens=40)
    for _ in range(5):
        driver.turn()
    newest = driver.turn()
    assert newest is not None
    # what is on the device while the request arrives is step k; with overlap step k + 1 is planned already
    running_step_id = newest.step_id if num_in_flight_steps == 1 else newest.step_id - 1
    driver.add("new", [4, 5])
    plan = driver.turn()
    assert plan is not None
    assert admitted(plan) == ["new"]
    assert plan.step_id <= running_step_id + delay
    assert (list(plan.num_tokens), list(plan.samples)) == ([1, 2], [True, True])


def test_a_finished_row_is_out_of_the_next_batch_and_its_row_is_used_again() -> None:
    driver = Driver.make(max_num_seqs=2)
    driver.add("a", [1], max_tokens=1)
    driver.add("b", [2], max_tokens=3)
    driver.add("c", [3], max_tokens=1)
    driver.turn()
    plan = driver.turn()
    assert plan is not None
    assert (list(plan.rows), list(plan.released_rows), admitted(plan)) == ([1, 0], [0], ["c"])


def test_unchanged_columns_are_the_same_objects() -> None:
    driver = Driver.make()
    driver.add("a", [1, 2], max_tokens=9)
    driver.add("b", [3, 4], max_tokens=9)
    driver.turn()
    first, second = driver.turn(), driver.turn()
    assert first is not None
    assert second is not None
    assert first.rows is second.rows
    assert first.num_tokens is second.num_tokens
    assert first.samples is second.samples
    assert (list(first.start_positions), list(second.start_positions)) == ([2, 2], [3, 3])


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    driver = Driver.make(max_num_batched_tokens=8, num_blocks=32)
    driver.add("short", [1], max_tokens=20)
    driver.turn()
    driver.add("long", range(20), max_tokens=2)
    plans = [driver.turn() for _ in range(4)]
    assert [list(plan.num_tokens) for plan in plans if plan is not None] == [[1, 7], [1, 7], [1, 6], [1, 1]]
    assert [list(plan.samples) for plan in plans if plan is not None] == [[True, False], [True, False], [True, True], [True, True]]


def test_the_chunk_limit_leaves_budget_for_others() -> None:
    driver = Driver.make(max_num_batched_tokens=8, max_chunk_tokens=5)
    driver.add("long", range(20), max_tokens=2)
    driver.add("short", [7, 7], max_tokens=2)
    plan = driver.turn()
    assert plan is not None
    assert list(plan.num_tokens) == [5, 2]


def test_blocks_are_taken_as_tokens_come() -> None:
    driver = Driver.make(max_num_batched_tokens=6)
    driver.add("a", range(11), max_tokens=4)
    held = []
    while driver.scheduler.has_work:
        driver.turn()
        held.append(driver.counts().num_active_blocks)
    # 6 + 5 prompt tokens, then positions 11, 12 and 13
    assert held == [2, 3, 3, 4, 0]


def test_admission_leaves_the_watermark_free_while_others_run() -> None:
    driver = Driver.make(num_blocks=8, watermark_fraction=0.25)
    driver.add("a", range(12), max_tokens=2)
    driver.add("b", range(100, 112), max_tokens=2)
    driver.add("c", range(200, 216), max_tokens=2)
    assert admitted(driver.turn()) == ["a", "b"]  # 6 of 8 blocks; 2 stay free
    assert driver.scheduler.waiting_reason("c") == "blocks"


def test_the_watermark_does_not_bind_a_request_that_runs_alone() -> None:
    driver = Driver.make(num_blocks=4, watermark_fraction=0.5)
    driver.add("a", range(15), max_tokens=2)
    assert admitted(driver.turn()) == ["a"]


def test_admission_leaves_running_prefills_the_blocks_of_their_known_tokens() -> None:
    driver = Driver.make(num_blocks=8, max_chunk_tokens=4)
    driver.add("a", range(24), max_tokens=1)
    driver.add("b", range(100, 112), max_tokens=1)
    assert admitted(driver.turn()) == ["a"]  # 1 block held, 5 promised, 2 left and 3 needed
    assert driver.scheduler.waiting_reason("b") == "blocks"


def test_a_request_that_waits_for_blocks_is_bypassed_a_bounded_number_of_times() -> None:
    driver = Driver.make(num_blocks=8, max_num_seqs=8, max_bypasses=2)
    driver.add("running", range(13), max_tokens=4)
    driver.turn()
    driver.add("big", range(100, 120), max_tokens=4)
    for index in range(4):
        driver.add(f"small{index}", [index], max_tokens=1)
    assert admitted(driver.turn()) == ["small0", "small1"]
    assert admitted(driver.turn()) == []
    assert driver.counts().num_bypasses == 2
    driver.run()
    assert [event.request_id for event in driver.events if type(event).__name__ == "Admitted"][3:] == ["big", "small2", "small3"]


def test_a_plan_stops_looking_after_many_requests_that_find_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver.make(num_blocks=8, max_num_seqs=64)
    driver.add("running", range(13), max_tokens=4)
    driver.turn()
    for index in range(40):
        driver.add(f"big{index}", range(100 * index + 100, 100 * index + 120), max_tokens=4)
    looks: list[str] = []
    match_prefix = KVCacheManager.match_prefix

    def note(self: KVCacheManager, request: Request) -> PrefixMatch:
        looks.append(request.request_id)
        return match_prefix(self, request)

    monkeypatch.setattr(KVCacheManager, "match_prefix", note)
    driver.turn()
    assert looks == [f"big{index}" for index in range(MAX_BLOCKED + 1)]
    assert driver.steps[-1].waiting_by_reason == {"blocks": 40}
    assert driver.scheduler.waiting_reason("big39") == "blocks"


def test_a_lookup_hashes_no_further_than_the_first_missing_block() -> None:
    driver = Driver.make(num_blocks=8, max_num_batched_tokens=4)
    driver.add("writer", range(20), max_tokens=1)
    driver.add("reader", [*range(20), 7, 7, 7, 7], max_tokens=1)
    driver.turn()
    driver.add("waits for its blocks", range(100, 132), max_tokens=1)
    driver.turn()
    requests = driver.scheduler._state.requests
    assert len(requests["reader"].block_hashes) <= 2
    driver.run()


def test_max_num_seqs_bounds_the_rows() -> None:
    driver = Driver.make(max_num_seqs=2)
    for name in "abc":
        driver.add(name, [1])
    assert admitted(driver.turn()) == ["a", "b"]
    assert driver.scheduler.waiting_reason("c") == "max_num_seqs"
    assert driver.steps[-1].waiting_by_reason == {"max_num_seqs": 1}
    assert driver.scheduler.waiting_reason("a") is None
    assert driver.scheduler.waiting_reason("unknown") is None


def test_the_token_budget_is_a_reason_to_wait() -> None:
    driver = Driver.make(max_num_batched_tokens=4)
    driver.add("a", range(8))
    driver.add("b", [1])
    driver.turn()
    assert driver.scheduler.waiting_reason("b") == "token_budget"


def test_lower_priority_goes_first_then_arrival() -> None:
    driver = Driver.make(max_num_seqs=1, scheduling_policy="priority")
    for name, priority in (("late", 2), ("early", 0), ("middle", 1), ("early too", 0)):
        driver.add(name, [1], max_tokens=1, priority=priority)
    driver.run()
    assert list(driver.last) == ["early", "early too", "middle", "late"]


def test_requests_behind_a_blocked_class_wait_for_priority() -> None:
    driver = Driver.make(max_num_seqs=1, scheduling_policy="priority")
    for index, priority in enumerate((0, 0, 1, 2)):
        driver.add(f"r{index}", [1], priority=priority)
    driver.turn()
    assert driver.steps[-1].waiting_by_reason == {"max_num_seqs": 1, "priority": 2}
    assert driver.scheduler.waiting_reason("r3") == "priority"


def test_fcfs_refuses_a_priority_that_it_would_ignore() -> None:
    driver = Driver.make(max_num_seqs=1)
    driver.add("a", [1], max_tokens=1, priority=0)
    with pytest.raises(InvalidRequestError, match="scheduling_policy='priority'"):
        driver.add("b", [1], max_tokens=1, priority=2)
    driver.run()
    assert list(driver.last) == ["a"]


def test_an_idle_engine_waits_for_a_fuller_batch_at_most_max_batch_wait() -> None:
    scheduler = Scheduler(make_limits(max_batch_wait_s=0.5))
    scheduler.add(make_request("a", [1]), 10.0)
    assert scheduler.schedule(10.2) is None
    assert scheduler.next_wake_s(10.2) == 10.5
    scheduler.add(make_request("b", [1]), 10.4)
    assert admitted(scheduler.schedule(10.5)) == ["a", "b"]
    assert scheduler.next_wake_s(10.5) is None


def by_reason(scheduler: Scheduler) -> dict[str, int]:
    """What the gauge says, which is what a look at each waiting request finds."""
    told = scheduler.take_events().waiting_by_reason
    each = Counter(scheduler.waiting_reason(request.request_id) for request in scheduler._state.waiting)
    assert told == dict(each)
    return told


def after_a_full_batch(**changes: object) -> Driver:
    """An idle engine of three rows whose last plan left two requests waiting for a row."""
    driver = Driver.make(max_num_seqs=3, **changes)
    for name in "abcxy":
        driver.add(name, [1], max_tokens=9)
    driver.now_s += 10.0
    driver.turn()
    assert driver.steps[-1].waiting_by_reason == {"max_num_seqs": 2}
    for name in "abcxy":
        driver.scheduler.abort(name, driver.now_s)
    driver.run()
    driver.take()
    return driver


def test_who_waits_for_a_fuller_batch_waits_for_that_and_not_for_what_stopped_an_earlier_plan() -> None:
    driver = after_a_full_batch(max_batch_wait_s=5.0)
    scheduler, now_s = driver.scheduler, driver.now_s
    scheduler.add(make_request("d", [1]), now_s)
    assert scheduler.schedule(now_s) is None
    assert by_reason(scheduler) == {"batch_window": 1}
    scheduler.add(make_request("e", [1]), now_s + 1.0)
    assert by_reason(scheduler) == {"batch_window": 1, "next_step": 1}
    assert scheduler.schedule(now_s + 1.0) is None
    assert by_reason(scheduler) == {"batch_window": 2}
    scheduler.abort("d", now_s + 2.0)
    assert by_reason(scheduler) == {"batch_window": 1}
    assert admitted(scheduler.schedule(now_s + 5.0)) == ["e"]
    assert by_reason(scheduler) == {}


def test_behind_the_window_the_plan_says_what_each_waits_for() -> None:
    driver = after_a_full_batch(max_batch_wait_s=5.0, max_num_batched_tokens=4)
    scheduler, now_s = driver.scheduler, driver.now_s
    for name in "de":
        scheduler.add(make_request(name, range(8)), now_s)
    assert scheduler.schedule(now_s) is None
    assert admitted(scheduler.schedule(now_s + 5.0)) == ["d"]
    assert by_reason(scheduler) == {"token_budget": 1}


def test_who_came_after_the_last_plan_waits_for_the_next_one() -> None:
    driver = after_a_full_batch()
    scheduler, now_s = driver.scheduler, driver.now_s
    scheduler.add(make_request("d", [1]), now_s)
    assert by_reason(scheduler) == {"next_step": 1}
    driver = Driver.make(max_num_seqs=1, scheduling_policy="priority")
    for name, priority in (("a", 0), ("b", 0), ("c", 2)):
        driver.add(name, [1], max_tokens=9, priority=priority)
    driver.turn()
    driver.add("d", [1], priority=1)
    assert by_reason(driver.scheduler) == {"max_num_seqs": 1, "priority": 1, "next_step": 1}
    driver.turn()
    assert by_reason(driver.scheduler) == {"max_num_seqs": 1, "priority": 2}


def test_a_full_batch_does_not_wait() -> None:
    scheduler = Scheduler(make_limits(max_batch_wait_s=0.5, max_num_seqs=2))
    scheduler.add(make_request("a", [1]), 10.0)
    assert scheduler.schedule(10.0) is None
    scheduler.add(make_request("b", [1]), 10.1)
    assert admitted(scheduler.schedule(10.1)) == ["a", "b"]


def test_a_running_engine_does_not_wait() -> None:
    driver = Driver.make(max_batch_wait_s=0.5)
    driver.add("a", [1], max_tokens=9)
    driver.turn()
    driver.add("b", [1])
    assert driver.scheduler.next_wake_s(driver.now_s) is None
    assert admitted(driver.turn()) == ["b"]


def test_no_more_steps_are_planned_than_may_be_in_flight() -> None:
    scheduler = Scheduler(make_limits(num_in_flight_steps=2))
    scheduler.add(make_request("a", [1], max_tokens=9), 0.0)
    assert scheduler.schedule(0.0) is not None
    assert scheduler.can_schedule
    assert scheduler.schedule(0.0) is not None
    assert not scheduler.can_schedule
    assert scheduler.schedule(0.0) is None
    assert scheduler.has_work
