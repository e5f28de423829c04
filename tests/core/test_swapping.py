"""Blocks that go to host memory and come back: what is planned, what is counted. Blocks hold 4 tokens."""

from __future__ import annotations

import random

import pytest

from pagedcore.core.events import Admitted, Preempted, Resumed
from pagedcore.core.lookup import LookupReport
from pagedcore.host_tier.swapped import Swapped
from pagedcore.outputs import CacheReport
from support.core_builders import Driver
from support.fake_runner import next_token

STEM = list(range(100, 108))
OTHER = list(range(50, 63))


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def lookup_of(driver: Driver, request_id: str) -> LookupReport:
    (event,) = [event for event in driver.events_of(Admitted) if event.request_id == request_id]
    assert event.lookup is not None
    return event.lookup


def cache_of(driver: Driver, request_id: str) -> CacheReport:
    report = driver.last[request_id].cache
    assert report is not None
    return report


def run_one(driver: Driver, name: str, prompt: list[int], **changes: object) -> CacheReport:
    driver.add(name, prompt, **{"max_tokens": 1, **changes})
    driver.run()
    return cache_of(driver, name)


def num_swapped(driver: Driver) -> tuple[int, int]:
    """(out, in) since the start."""
    return sum(s.num_swapped_out_blocks for s in driver.steps), sum(s.num_swapped_in_blocks for s in driver.steps)


def make_swapped(**changes: object) -> Driver:
    """A pool of 4 blocks that has computed STEM and then needed all of them for OTHER: both blocks of STEM lie in host memory."""
    driver = Driver.make(**{"num_blocks": 4, "num_host_blocks": 8, **changes})
    run_one(driver, "writer", [*STEM, 1])
    run_one(driver, "evictor", OTHER)
    return driver


def test_an_evicted_block_is_copied_out_by_the_step_that_takes_its_place() -> None:
    driver = Driver.make(num_blocks=4, num_host_blocks=8)
    run_one(driver, "writer", [*STEM, 1])  # blocks 0, 1 and 2, of which the first two are hashed
    driver.add("evictor", OTHER, max_tokens=1)
    plan = driver.turn()
    assert plan is not None
    assert [list(row.block_ids) for row in plan.admitted] == [[3, 2, 1, 0]]
    assert (list(plan.copies_out), list(plan.copies_in)) == ([(1, 0), (0, 1)], [])
    assert num_swapped(driver) == (2, 0)


def test_a_prefix_in_host_memory_is_copied_back_and_not_computed() -> None:
    driver = make_swapped()
    driver.add("reader", [*STEM, 2], max_tokens=3)
    plan = driver.turn()
    assert plan is not None
    (row,) = plan.admitted
    assert list(plan.copies_in) == [(row.block_ids[0], 1), (row.block_ids[1], 0)]
    assert (list(plan.start_positions), list(plan.num_tokens)) == ([8], [1])
    driver.run()
    assert driver.tokens["reader"] == alone([*STEM, 2], 3)
    assert driver.runner.computed_positions["reader"] == [8, 9, 10]
    assert cache_of(driver, "reader") == CacheReport(num_prompt_tokens=9, num_eligible_blocks=2, host_tokens=8, computed_tokens=1)


def test_the_lookup_tells_hits_in_host_memory_from_blocks_of_the_device() -> None:
    driver = make_swapped()
    run_one(driver, "reader", [*STEM, 2, 2, 2, 2, 2])
    report = lookup_of(driver, "reader")
    assert (report.live_blocks, report.pool_blocks, report.host_blocks, report.num_resident_blocks) == (0, 0, 2, 0)
    assert (report.num_hit_tokens, report.first_missing_block, len(report.missed)) == (8, 2, 1)


def test_a_prefix_may_begin_on_the_device_and_go_on_in_host_memory() -> None:
    driver = Driver.make(num_blocks=4, num_host_blocks=8)
    run_one(driver, "writer", [*STEM, 1])
    run_one(driver, "evictor", OTHER[:9])  # 3 blocks: the tail of STEM goes
    report = run_one(driver, "reader", [*STEM, 2])
    assert (report.pool_tokens, report.host_tokens, report.computed_tokens, report.num_resident_blocks) == (4, 4, 1, 1)
    assert driver.tokens["reader"] == alone([*STEM, 2], 1)


def test_what_one_request_copies_back_another_one_shares_in_the_same_step() -> None:
    driver = make_swapped()
    driver.add("first", [*STEM, 2])
    driver.add("second", [*STEM, 3])
    plan = driver.turn()
    assert plan is not None
    assert ([row.request_id for row in plan.admitted], len(plan.copies_in)) == (["first", "second"], 2)
    driver.run()
    assert (cache_of(driver, "first").host_tokens, cache_of(driver, "second").live_tokens) == (8, 8)
    assert [driver.tokens[name] for name in ("first", "second")] == [alone([*STEM, 2], 4), alone([*STEM, 3], 4)]


def test_a_block_that_comes_back_is_an_acquisition_of_a_fresh_block_of_the_pool() -> None:
    driver = make_swapped()
    before = sum(step.num_fresh_acquisitions for step in driver.steps)
    run_one(driver, "reader", [*STEM, 2])
    assert sum(step.num_fresh_acquisitions for step in driver.steps) - before == 3
    assert sum(step.num_reused_acquisitions for step in driver.steps) == 0


def test_a_block_that_host_memory_still_has_is_not_copied_out_again() -> None:
    driver = make_swapped()
    assert num_swapped(driver) == (2, 0)
    run_one(driver, "reader", [*STEM, 2])  # takes a free block and the places of two of OTHER's three full ones
    assert num_swapped(driver) == (4, 2)
    run_one(driver, "another", range(20, 33))  # evicts the third one, and both of STEM
    assert num_swapped(driver) == (5, 2)


def test_without_a_tier_no_plan_copies_anything() -> None:
    driver = make_swapped(num_host_blocks=0)
    report = run_one(driver, "reader", [*STEM, 2])
    assert (report.host_tokens, report.computed_tokens, num_swapped(driver)) == (0, 9, (0, 0))
    assert driver.runner.host == {}


def test_salts_and_tenants_share_nothing_in_host_memory() -> None:
    driver = make_swapped(num_blocks=4, num_host_blocks=40)
    for index, domain in enumerate([{"cache_salt": ""}, {"cache_salt": "s"}, {"tenant": "t"}, {"tenant": ""}]):
        assert run_one(driver, f"r{index}", [*STEM, 1], **domain).num_cached_tokens == 0
    assert run_one(driver, "same", [*STEM, 1]).host_tokens == 8


def test_prompt_logprobs_read_nothing_from_host_memory() -> None:
    driver = make_swapped()
    assert run_one(driver, "reader", [*STEM, 2], prompt_logprobs=0).computed_tokens == 9
    assert lookup_of(driver, "reader").host_blocks == 0


def test_a_reset_forgets_host_memory_too() -> None:
    driver = make_swapped()
    assert driver.scheduler.reset_prefix_cache(driver.now_s)
    assert run_one(driver, "reader", [*STEM, 2]).computed_tokens == 9


def make_crowd(**changes: object) -> Driver:
    """Two requests of 4 prompt and 12 output tokens in 5 blocks: each wants 4, so the later one gives way to the first."""
    driver = Driver.make(**{"num_blocks": 5, "max_num_seqs": 2, "num_host_blocks": 8, **changes})
    driver.add("a", [0] * 4, max_tokens=12)
    driver.add("b", [1] * 4, max_tokens=12)
    return driver


def test_blocks_of_a_preempted_request_come_back_and_are_not_computed_again() -> None:
    driver = make_crowd()
    driver.run()
    (preempted,), (resumed,) = driver.events_of(Preempted), driver.events_of(Resumed)
    # b goes with two full blocks; a takes the fifth block, then one of b's, which is copied out first
    assert (preempted.request_id, preempted.num_lost_tokens) == ("b", 8)
    assert (resumed.request_id, resumed.num_recomputed_tokens) == ("b", 0)
    swapped = [(event.request_id, event.direction, event.num_blocks) for event in driver.events_of(Swapped)]
    assert swapped == [("b", "out", 1), ("b", "in", 1)]
    assert driver.runner.computed_positions["b"] == list(range(15))
    assert [driver.tokens[name] for name in "ab"] == [alone([0] * 4, 12), alone([1] * 4, 12)]


def test_without_a_tier_the_same_request_computes_again() -> None:
    driver = make_crowd(num_host_blocks=0)
    driver.run()
    assert [event.num_recomputed_tokens for event in driver.events_of(Resumed)] == [4]
    assert driver.events_of(Swapped) == []


def test_a_preempted_request_counts_as_swapped_from_its_first_copy_until_it_runs_again() -> None:
    driver = make_crowd()
    seen = []
    while driver.scheduler.has_work:
        driver.turn()
        step = driver.steps[-1]
        seen.append((step.num_waiting, step.num_swapped))
    assert sorted(set(seen)) == [(0, 0), (1, 0), (1, 1)]
    assert seen.index((1, 0)) < seen.index((1, 1))


def test_a_request_that_is_aborted_while_it_is_swapped_is_counted_no_more() -> None:
    driver = make_crowd()
    while not driver.events_of(Swapped):
        driver.turn()
    assert driver.steps[-1].num_swapped == 1
    driver.scheduler.abort("b", driver.now_s)
    driver.take()
    assert driver.steps[-1].num_swapped == 0
    driver.run()
    assert [event.direction for event in driver.events_of(Swapped)] == ["out"]


def test_an_abort_while_blocks_are_copied_back_leaves_them_for_others() -> None:
    driver = make_swapped(num_in_flight_steps=2)
    driver.add("aborted", [*STEM, 2], max_tokens=4)
    plan = driver.schedule()
    assert plan is not None
    assert len(plan.copies_in) == 2
    driver.scheduler.abort("aborted", driver.now_s)
    driver.take()
    driver.add("next", [*STEM, 3], max_tokens=2)
    driver.run()
    assert (cache_of(driver, "next").num_cached_tokens, driver.tokens["next"]) == (8, alone([*STEM, 3], 2))


@pytest.mark.parametrize("is_copied_back_at_once", [True, False])
def test_what_a_failed_step_was_to_copy_out_is_never_read(is_copied_back_at_once: bool) -> None:
    """With two steps in flight, the second one may copy back what the first one, which fails, was to copy out."""
    driver = Driver.make(num_blocks=10, num_host_blocks=8, num_in_flight_steps=2)
    run_one(driver, "writer", [*STEM, 1])
    run_one(driver, "bystander", range(20, 49))  # 8 blocks, younger than STEM's
    driver.add("evictor", range(60, 69), max_tokens=2)
    failing = driver.schedule()
    assert failing is not None
    assert len(failing.copies_out) == 2
    driver.runner.failing_steps = {failing.step_id}
    if is_copied_back_at_once:
        driver.add("reader", [*STEM, 2], max_tokens=2)
        plan = driver.schedule()
        assert plan is not None
        assert {host_block for _, host_block in plan.copies_in} == {host_block for _, host_block in failing.copies_out}
    driver.run()
    assert driver.last["evictor"].status == "error"
    assert not is_copied_back_at_once or driver.last["reader"].status == "error"
    report = run_one(driver, "again", [*STEM, 5], max_tokens=2)
    assert (report.num_cached_tokens, driver.tokens["again"]) == (0, alone([*STEM, 5], 2))


def served_tokens(prompts: list[list[int]], **changes: int) -> tuple[list[int], list[int]]:
    """(tokens from the pool, tokens from host memory) of each prompt, one after the other."""
    driver = Driver.make(max_num_seqs=1, **changes)
    reports = [run_one(driver, f"r{index}", prompt, max_tokens=2) for index, prompt in enumerate(prompts)]
    return [report.pool_tokens for report in reports], [report.host_tokens for report in reports]


@pytest.mark.parametrize("seed", range(20))
def test_the_hit_rate_rises_by_what_host_memory_holds(seed: int) -> None:
    """The pool serves exactly what it serves without a tier; with what host memory adds, at most as much as a pool of both sizes."""
    rng = random.Random(seed)
    stems = [[rng.randrange(40) for _ in range(24)] for _ in range(4)]
    prompts = [rng.choice(stems)[: rng.randint(1, 24)] + [rng.randrange(40) for _ in range(rng.randint(1, 9))] for _ in range(30)]
    pool, host = served_tokens(prompts, num_blocks=10, num_host_blocks=10)
    without, _ = served_tokens(prompts, num_blocks=10)
    large, _ = served_tokens(prompts, num_blocks=20)
    assert pool == without
    assert all(here + there <= most for here, there, most in zip(pool, host, large, strict=True))
    assert sum(host) >= 0.75 * (sum(large) - sum(without)) > 0


def test_a_round_of_prompts_larger_than_the_pool_is_served_from_host_memory_only() -> None:
    """The classic worst case of an LRU pool: whatever comes next was evicted just before."""
    prompts = [[index] * 8 + [1] for index in range(6)] * 3
    pool, host = served_tokens(prompts, num_blocks=6, num_host_blocks=12)
    assert (sum(pool), host[:6], host[6:]) == (0, [0] * 6, [8] * 12)
    assert served_tokens(prompts, num_blocks=6)[0] == [0] * 18
