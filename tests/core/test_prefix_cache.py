"""Sharing of prefixes, and the exact books about it. Blocks hold 4 tokens unless a test says otherwise."""

from __future__ import annotations

import pytest

from pagedcore.core.events import Admitted
from pagedcore.core.lookup import LookupReport
from pagedcore.outputs import CacheReport
from support.core_builders import Driver, make_request

STEM = list(range(100, 108))


def lookup_of(driver: Driver, request_id: str) -> LookupReport:
    (event,) = [event for event in driver.events_of(Admitted) if event.request_id == request_id]
    assert event.lookup is not None
    return event.lookup


def cache_of(driver: Driver, request_id: str) -> CacheReport:
    report = driver.last[request_id].cache
    assert report is not None
    return report


def acquisitions(driver: Driver) -> tuple[int, int]:
    """(reused, fresh) since the start."""
    return sum(s.num_reused_acquisitions for s in driver.steps), sum(s.num_fresh_acquisitions for s in driver.steps)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 33, 47, 48])
@pytest.mark.parametrize("block_size", [8, 16])
def test_the_second_request_computes_what_is_left_after_its_full_blocks(num_tokens: int, block_size: int) -> None:
    driver = Driver.make(block_size=block_size, max_model_len=64)
    for name in ("first", "second"):
        driver.add(name, range(num_tokens), max_tokens=2)
        driver.run()
    prompt_positions = [p for p in driver.runner.computed_positions["second"] if p < num_tokens]
    assert len(prompt_positions) == num_tokens - block_size * ((num_tokens - 1) // block_size)
    assert driver.tokens["first"] == driver.tokens["second"]


def test_64_live_requests_hold_a_shared_prefix_once() -> None:
    block_size, num_prefix = 16, 1024
    driver = Driver.make(
        block_size=block_size, num_blocks=64 + 64, max_model_len=1100, max_num_seqs=64, max_num_batched_tokens=2048, max_bypasses=0
    )
    for index in range(64):
        driver.add(f"r{index}", [*range(num_prefix), 2000 + index], max_tokens=8)
    driver.turn()
    counts = driver.counts()
    assert counts.num_running == 64
    assert counts.num_active_blocks == num_prefix // block_size + 64
    driver.scheduler.abort("r0", driver.now_s)
    driver.take()
    assert driver.counts().num_active_blocks == num_prefix // block_size + 63


@pytest.mark.parametrize("budget", [4096, 100])
@pytest.mark.parametrize("num_in_flight_steps", [1, 2])
def test_256_requests_with_one_prefix_at_once_compute_it_once(budget: int, num_in_flight_steps: int) -> None:
    num_requests, num_prefix = 256, 128
    driver = Driver.make(
        block_size=16,
        num_blocks=600,
        max_model_len=160,
        max_num_seqs=256,
        max_num_batched_tokens=budget,
        num_in_flight_steps=num_in_flight_steps,
    )
    for index in range(num_requests):
        driver.scheduler.add(make_request(f"r{index}", [*range(num_prefix), 1000 + index], max_tokens=1), driver.now_s)
    for _ in range(40):
        driver.turn()
        if not driver.scheduler.has_work:
            break
    computed = [p for positions in driver.runner.computed_positions.values() for p in positions if p < num_prefix]
    assert sorted(computed) == list(range(num_prefix))
    assert len(driver.last) == num_requests


def test_a_request_in_the_same_step_shares_live_blocks() -> None:
    driver = Driver.make()
    driver.add("a", [*STEM, 1])
    driver.add("b", [*STEM, 2])
    plan = driver.turn()
    assert plan is not None
    assert [list(admitted.block_ids) for admitted in plan.admitted] == [[0, 1, 2], [0, 1, 3]]
    assert (list(plan.start_positions), list(plan.num_tokens)) == ([0, 8], [9, 1])
    report = lookup_of(driver, "b")
    assert (report.live_blocks, report.pool_blocks, report.num_resident_blocks, report.missed) == (2, 0, 2, ())


def test_blocks_of_an_ended_request_are_revived_from_the_pool() -> None:
    driver = Driver.make()
    driver.add("a", [*STEM, 1], max_tokens=1)
    driver.run()
    driver.add("b", [*STEM, 2], max_tokens=1)
    driver.run()
    report = lookup_of(driver, "b")
    assert (report.live_blocks, report.pool_blocks, report.num_hit_tokens) == (0, 2, 8)
    expected = CacheReport(num_prompt_tokens=9, num_eligible_blocks=2, num_resident_blocks=2, pool_tokens=8, computed_tokens=1)
    assert cache_of(driver, "b") == expected


def test_the_last_prompt_token_is_always_computed() -> None:
    driver = Driver.make()
    for name in ("a", "b"):
        driver.add(name, STEM, max_tokens=1)
        driver.run()
    report = lookup_of(driver, "b")
    assert (report.num_eligible_blocks, report.pool_blocks) == (1, 1)
    assert driver.runner.computed_positions["b"] == [4, 5, 6, 7]


def test_generated_blocks_are_shared_by_the_next_turn_of_a_conversation() -> None:
    driver = Driver.make()
    driver.add("a", [*STEM, 1], max_tokens=8)
    driver.run()
    answer = driver.tokens["a"]
    driver.add("b", [*STEM, 1, *answer, 5], max_tokens=1)
    driver.run()
    # 9 + 8 tokens of which the last was sampled and never computed: 16 computed, 4 full blocks
    assert lookup_of(driver, "b").pool_blocks == 4


def test_a_hole_is_resident_behind_a_missing_block() -> None:
    driver = Driver.make()
    prompt = [*STEM, *range(4), 1]
    driver.add("a", prompt, max_tokens=1)
    driver.run()
    pool = driver.scheduler._state.kv.pool
    pool.unpublish([1])  # the middle block of three; eviction itself takes leaves first
    driver.add("b", prompt, max_tokens=1)
    driver.run()
    report = lookup_of(driver, "b")
    assert (report.num_eligible_blocks, report.num_resident_blocks, report.pool_blocks) == (3, 2, 1)
    assert [(is_resident, is_computing) for _, is_resident, is_computing in report.missed] == [(False, False), (True, False)]


def test_eviction_leaves_no_holes() -> None:
    driver = Driver.make(num_blocks=4)
    driver.add("a", [*STEM, *range(4), 1], max_tokens=1)
    driver.run()
    driver.add("b", range(50, 55), max_tokens=1)
    driver.run()
    assert len(driver.evicted()) == 1
    driver.add("c", [*STEM, *range(4), 1], max_tokens=1)
    driver.run()
    report = lookup_of(driver, "c")
    assert (report.pool_blocks, report.num_resident_blocks) == (2, 2)


def test_the_nearest_cached_prefix_is_reported_at_the_first_missing_block() -> None:
    driver = Driver.make()
    driver.add("a", [*STEM, 1], max_tokens=1)
    driver.run()
    driver.add("diverged", [*STEM[:6], 7, 7, 7], max_tokens=1)
    driver.add("cold", [1, 2, 3, 4, 5], max_tokens=1)
    driver.add("past the end", [*STEM, 1, 1, 1, 1, 1], max_tokens=1)
    driver.run()
    assert (lookup_of(driver, "diverged").first_missing_block, lookup_of(driver, "diverged").sibling_common_tokens) == (1, 2)
    assert (lookup_of(driver, "cold").first_missing_block, lookup_of(driver, "cold").sibling_common_tokens) == (0, 0)
    assert (lookup_of(driver, "past the end").first_missing_block, lookup_of(driver, "past the end").sibling_common_tokens) == (2, None)


def test_salts_and_tenants_never_share() -> None:
    driver = Driver.make(num_blocks=32)
    domains = [{}, {"cache_salt": ""}, {"cache_salt": "s"}, {"tenant": "t"}, {"tenant": ""}]
    for index, domain in enumerate(domains):
        driver.add(f"r{index}", [*STEM, 1], max_tokens=1, **domain)
        driver.run()
        assert lookup_of(driver, f"r{index}").num_resident_blocks == 0
        assert lookup_of(driver, f"r{index}").sibling_common_tokens is None


def test_prompt_logprobs_read_nothing_and_publish_for_others() -> None:
    driver = Driver.make()
    driver.add("a", [*STEM, 1], max_tokens=1)
    driver.run()
    driver.add("b", [*STEM, 1], max_tokens=1, prompt_logprobs=0)
    driver.run()
    report = lookup_of(driver, "b")
    assert (report.caching_disabled, report.num_hit_tokens, report.num_eligible_blocks, report.missed) == (True, 0, 2, ())
    driver.add("c", range(9), max_tokens=1, prompt_logprobs=0)
    driver.run()
    driver.add("d", range(9), max_tokens=1)
    driver.run()
    assert lookup_of(driver, "d").pool_blocks == 2


def test_with_caching_off_nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedcore.core.kv_cache_manager.hash_blocks", None)
    driver = Driver.make(enable_prefix_caching=False)
    for name in ("a", "b"):
        driver.add(name, [*STEM, 1], max_tokens=8)
    driver.run()
    assert driver.counts().num_cached_blocks == 0
    assert lookup_of(driver, "b").caching_disabled


def test_acquisitions_count_prompt_and_growth_once_each() -> None:
    driver = Driver.make()
    driver.add("a", [*STEM, 1], max_tokens=5)  # computes 13 tokens: 3 blocks, then 1
    driver.run()
    assert acquisitions(driver) == (0, 4)
    driver.add("b", [*STEM, 2], max_tokens=1)  # 2 of the pool, 1 fresh
    driver.run()
    assert acquisitions(driver) == (2, 5)
    assert [gap for step in driver.steps for gap in step.reuse_gaps_s] == [pytest.approx(driver.now_s - 1.0)] * 2


def test_choices_of_one_request_are_one_lookup_and_no_reuse() -> None:
    driver = Driver.make()
    for choice in range(3):
        driver.add("g" if choice == 0 else f"g#{choice}", [*STEM, 1], max_tokens=1, group_id="g", choice_index=choice, num_choices=3)
    driver.run()
    lookups = {event.request_id: event.lookup for event in driver.events_of(Admitted)}
    assert lookups["g"] is not None
    assert (lookups["g#1"], lookups["g#2"]) == (None, None)
    assert acquisitions(driver) == (0, 5)
    assert [gap for step in driver.steps for gap in step.reuse_gaps_s] == []
    assert (cache_of(driver, "g#2").live_tokens, cache_of(driver, "g#2").computed_tokens) == (8, 1)


def test_a_block_being_computed_is_waited_for_while_other_work_goes_first() -> None:
    driver = Driver.make(max_chunk_tokens=4)
    driver.add("a", [*STEM, *STEM, 1])
    driver.add("b", [*STEM, *STEM, 2])
    driver.add("other", [9, 9, 9])
    plans = [driver.turn() for _ in range(5)]
    admitted = [[row.request_id for row in plan.admitted] for plan in plans if plan is not None]
    assert admitted == [["a", "other"], [], [], ["b"], []]
    assert driver.counts().num_prefix_waits == 3
    assert lookup_of(driver, "b").live_blocks == 4


def test_the_wait_for_a_prefix_is_bounded_and_then_a_miss_in_flight() -> None:
    driver = Driver.make(max_chunk_tokens=4, max_prefix_wait_steps=2)
    prompt = [*range(20), 1]
    driver.add("a", prompt)
    driver.add("b", prompt)
    driver.run()
    report = lookup_of(driver, "b")
    assert report.live_blocks == 3
    assert [is_computing for _, _, is_computing in report.missed] == [True, True]
    assert driver.tokens["a"] == driver.tokens["b"]


def test_a_waiting_request_goes_on_when_the_one_that_computes_its_prefix_ends() -> None:
    driver = Driver.make(max_chunk_tokens=4)
    driver.add("a", [*STEM, *STEM, 1])
    driver.add("b", [*STEM, *STEM, 2])
    driver.turn()
    driver.scheduler.abort("a", driver.now_s)
    driver.take()
    driver.turn()
    assert lookup_of(driver, "b").pool_blocks == 1
    driver.run()
    assert cache_of(driver, "a").abandoned_tokens == 13


def test_reset_forgets_what_nobody_owns_and_says_whether_all_is_gone() -> None:
    driver = Driver.make()
    driver.add("a", [*STEM, 1], max_tokens=3)
    driver.turn()
    assert not driver.scheduler.reset_prefix_cache(driver.now_s)
    driver.run()
    assert driver.counts().num_cached_blocks == 2
    assert driver.scheduler.reset_prefix_cache(driver.now_s)
    assert driver.counts().num_free_blocks == 16
    driver.add("b", [*STEM, 1], max_tokens=1)
    driver.run()
    assert lookup_of(driver, "b").num_resident_blocks == 0
