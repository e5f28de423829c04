"""Quotas of tenants in the whole core: tokens stay what they were, counts stay exact, and a flood costs its own tenant."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore.core.events import Admitted, BlockEvicted, Finished, PassedOver, Preempted
from pagedcore.core.kv_cache_manager import KVCacheManager
from pagedcore.core.scheduler import Scheduler
from pagedcore.errors import PoolTooSmallError, QueueFullError, TenantQuotaError
from pagedcore.host_tier.host_tier import HostTier
from pagedcore.messages import AddRequest
from pagedcore.tenancy.eviction import ShareOrder
from pagedcore.tenancy.limits import TenantLimits
from support.core_builders import Driver, make_limits, make_request
from support.scenarios import Scenario, check_outcome, make_scenario, rare_paths, run_scenario

NUM_SEEDS = 20


def make_driver(num_blocks: int = 16, max_num_seqs: int = 4, **quotas: Any) -> Driver:
    return Driver.make(num_blocks=num_blocks, max_num_seqs=max_num_seqs, tenants=TenantLimits(**quotas))


def running(driver: Driver) -> list[str]:
    return [request.request_id for request in driver.scheduler._state.running]


def waiting_by_reason(driver: Driver) -> dict[str, int]:
    """As it is told in bulk, checked against what each waiting request says."""
    told = driver.steps[-1].waiting_by_reason
    each = Counter(driver.scheduler.waiting_reason(request.request_id) for request in driver.scheduler._state.waiting)
    assert told == dict(each)
    return told


# ---- rows


def test_a_tenant_at_its_quota_of_rows_waits_and_later_requests_of_others_pass_it() -> None:
    driver = make_driver(max_running=2)
    for name, tenant in (("a0", "a"), ("a1", "a"), ("a2", "a"), ("a3", "a"), ("b0", "b"), ("c0", None)):
        driver.add(name, [ord(name[0]), ord(name[1])], tenant=tenant)
    driver.schedule()
    assert running(driver) == ["a0", "a1", "b0", "c0"]
    assert waiting_by_reason(driver) == {"tenant_quota": 2}
    assert driver.counts().num_bypasses == 0
    driver.run()
    assert [event.request_id for event in driver.events_of(Admitted)] == ["a0", "a1", "b0", "c0", "a2", "a3"]


def test_what_stands_in_line_waits_for_a_row_and_what_is_behind_it_for_the_quota() -> None:
    driver = make_driver(max_num_seqs=2, max_running=1)
    for name, tenant in (("a0", "a"), ("b0", "b"), ("c0", "c"), ("c1", "c"), ("a1", "a")):
        driver.add(name, [ord(name[0])], tenant=tenant)
    driver.schedule()
    assert waiting_by_reason(driver) == {"max_num_seqs": 1, "tenant_quota": 2}


def test_requests_without_a_tenant_are_one_tenant_whichever_way_they_name_none() -> None:
    driver = make_driver(max_running=1)
    driver.add("none", [1], tenant=None)
    driver.add("empty", [2], tenant="")
    driver.schedule()
    assert running(driver) == ["none"]


def test_a_row_that_gets_free_goes_to_the_next_of_its_tenant() -> None:
    driver = make_driver(max_running=1)
    for name in ("a0", "a1", "a2"):
        driver.add(name, [1, 2], tenant="a", max_tokens=2)
    driver.turn()
    driver.scheduler.abort("a0", driver.now_s)
    driver.take()
    driver.turn()
    assert running(driver) == ["a1"]
    assert [(event.request_id, event.reason) for event in driver.events_of(PassedOver)] == [
        ("a2", "tenant_quota"), ("a1", "tenant_quota"), ("a1", None)
    ]  # fmt: skip


def test_a_flood_of_waiting_requests_costs_a_plan_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []

    def match_prefix(self: KVCacheManager, request: Any) -> Any:
        looked_at.append(request.request_id)
        return matched(self, request)

    matched = KVCacheManager.match_prefix
    monkeypatch.setattr(KVCacheManager, "match_prefix", match_prefix)
    driver = make_driver(num_blocks=64, max_num_seqs=8, max_running=2)
    for number in range(1000):
        driver.scheduler.add(make_request(f"a{number}", [number % 40], tenant="a"), 0.0)
    driver.add("b0", [1], tenant="b")
    for _ in range(3):
        driver.turn()
    assert looked_at == ["a0", "a1", "b0"]
    assert len(driver.scheduler._state.waiting.line) == 0
    assert waiting_by_reason(driver) == {"tenant_quota": 998}


# ---- the queue


def test_a_tenant_whose_part_of_the_queue_is_full_is_refused_and_others_are_taken() -> None:
    driver = make_driver(max_num_seqs=1, max_waiting=2)
    driver.add("a0", [1], tenant="a")
    driver.turn()
    for name in ("a1", "a2"):
        driver.add(name, [2], tenant="a")
    with pytest.raises(TenantQuotaError) as refused:
        driver.add("a3", [3], tenant="a")
    assert str(refused.value) == (
        "2 requests of the tenant 'a' wait and max_waiting_per_tenant is 2; try again later, or raise max_waiting_per_tenant."
    )
    assert isinstance(refused.value, QueueFullError)
    assert (refused.value.http_status, refused.value.code) == (429, "tenant_quota")
    driver.add("b0", [4], tenant="b")
    driver.take()
    assert [(e.request.request_id, e.reject_reason) for e in driver.events_of(Finished)] == [("a3", "tenant_quota")]
    assert driver.counts().num_waiting == 3


def test_requests_that_find_a_row_at_once_do_not_fill_their_tenants_part_of_the_queue() -> None:
    driver = make_driver(max_num_seqs=4, max_running=2, max_waiting=1)
    for name in ("a0", "a1", "a2"):
        driver.add(name, [1], tenant=None)
    with pytest.raises(TenantQuotaError, match="1 requests without a tenant wait"):
        driver.add("a3", [1], tenant=None)


# ---- the cache


def test_a_request_that_alone_needs_more_than_its_tenants_share_is_refused() -> None:
    limits = make_limits(num_blocks=16, tenants=TenantLimits(cache_fraction=0.25))
    with pytest.raises(PoolTooSmallError, match=r"needs 5 KV blocks, and the share of one tenant is 4 of 16 "):
        Scheduler(limits).check(16, 4)
    Scheduler(limits).check(13, 4)


def test_a_flood_gives_up_its_own_blocks_and_leaves_those_of_a_tenant_within_its_share() -> None:
    driver = make_driver(num_blocks=8, cache_fraction=0.5)
    driver.add("b", range(13), tenant="b", max_tokens=1)
    driver.run()
    for number in range(9):
        driver.add(f"a{number}", range(100 * number, 100 * number + 9), tenant="a", max_tokens=1)
        driver.run()
    assert {event.tenant for event in driver.evicted()} == {"a"}
    driver.add("b again", range(13), tenant="b", max_tokens=1)
    driver.run()
    assert driver.last["b again"].cache.num_cached_tokens == 12  # type: ignore[union-attr]


def test_what_waits_for_its_tenants_share_lets_others_pass_and_says_so() -> None:
    driver = make_driver(num_blocks=8, cache_fraction=0.5, max_num_seqs=8)
    driver.add("b", range(13), tenant="b", max_tokens=1)
    driver.run()
    driver.add("a0", range(100, 113), tenant="a", max_tokens=4)
    driver.add("a1", range(200, 205), tenant="a", max_tokens=2)
    driver.add("a2", range(300, 301), tenant="a", max_tokens=2)
    driver.add("c0", range(400, 401), tenant="c", max_tokens=1)
    driver.schedule()
    assert running(driver) == ["a0", "c0"]
    assert waiting_by_reason(driver) == {"tenant_quota": 2}
    assert driver.counts().num_bypasses == 0
    assert driver.scheduler.pool.num_cached_blocks == 3  # all of b's
    driver.run()
    assert {event.tenant for event in driver.evicted()} <= {"a"}


def test_a_tenant_that_outgrows_its_share_preempts_its_own_requests() -> None:
    driver = make_driver(num_blocks=12, cache_fraction=0.5)
    driver.add("c", range(200, 213), tenant="c", max_tokens=1)
    driver.run()  # c caches three blocks
    for name, tenant, num_tokens in (("a0", "a", 8), ("a1", "a", 8), ("b", "b", 1)):
        driver.add(name, [ord(name[-1])] * num_tokens, tenant=tenant, max_tokens=14)
    driver.run()
    assert {event.request_id for event in driver.events_of(Preempted)} == {"a1"}
    assert all(driver.last[name].status == "completed" for name in ("a0", "a1", "b"))


def hit_tokens_of_b(cache_fraction: float | None) -> int:
    """B asks the same four questions over a long preface again and again, while A floods."""
    driver = make_driver(num_blocks=24, max_num_seqs=6, cache_fraction=cache_fraction)
    for turn in range(12):
        for number in range(4):
            driver.add(f"a{turn}.{number}", [100 + turn, number, *range(18)], tenant="a", max_tokens=3)
        driver.add(f"b{turn}", [*range(32), turn % 4, 1], tenant="b", max_tokens=2)
        driver.run()
    return sum(driver.last[f"b{turn}"].cache.num_cached_tokens for turn in range(12))  # type: ignore[union-attr]


def test_under_a_flood_a_share_keeps_the_hit_rate_of_the_tenant_that_is_flooded() -> None:
    assert hit_tokens_of_b(0.5) == 11 * 32
    assert hit_tokens_of_b(None) == 0


def test_host_memory_is_shared_alike() -> None:
    tier = HostTier(4, share_blocks=2)
    for number, tenant in enumerate("bbaa"):
        tier.put(bytes([number]), number, tenant)
    assert tier.order() == [b"\0", b"\1", b"\2", b"\3"]
    tier.put(b"a3", 4, "a")
    assert tier.order() == [b"\0", b"\1", b"\3", b"a3"]  # a gives up its own oldest
    tier.put(b"c1", 5, "c")
    assert tier.order() == [b"\1", b"\3", b"a3", b"c1"]  # nobody is over a share: the oldest of all
    tier.check_invariants(())


def host_tokens_after_a_flood(cache_fraction: float | None) -> int:
    """C and d push b's blocks out to host memory, each within its share; then a floods both. Returns what b finds there."""
    driver = Driver.make(num_blocks=8, num_host_blocks=12, tenants=TenantLimits(cache_fraction=cache_fraction))
    for name in ("b", "c", "d", *(f"a{number}" for number in range(9)), "b again"):
        driver.add(name, [ord(name[0]), *map(ord, name[1:2].strip()), *range(12)], tenant=name[0], max_tokens=1)
        driver.run()
    report = driver.last["b again"].cache
    assert report is not None
    return report.host_tokens


def test_under_a_flood_host_memory_keeps_the_blocks_of_a_tenant_within_its_share() -> None:
    assert host_tokens_after_a_flood(0.5) == 12
    assert host_tokens_after_a_flood(None) == 0


def test_what_a_tenant_has_no_share_of_host_memory_for_is_not_kept() -> None:
    tier = HostTier(2, share_blocks=1)
    tier.put(b"a1", 0, "a")
    tier.put(b"b1", 1, "b")
    tier.hold([b"a1"])
    tier.put(b"a2", 2, "a")
    assert (tier.num_leading([b"a2"]), tier.num_leading([b"b1"])) == (0, 1)
    tier.end_reads([(0, 0)])
    tier.put(b"a2", 2, "a")
    assert (tier.num_leading([b"a2"]), tier.num_leading([b"a1"]), tier.num_leading([b"b1"])) == (1, 0, 1)
    tier.check_invariants(())


# ---- random runs


def make_quota_scenario(seed: int, *, has_host_tier: bool) -> Scenario:
    """A scenario with quotas, whose requests fit their tenants' share; tenants are few, so that they meet."""
    rng = random.Random(f"quota {seed}")
    scenario = make_scenario(seed, has_host_tier=has_host_tier)
    limits = scenario.limits
    needed = max(limits.blocks_for(_max_tokens(request, limits.max_model_len) - 1) for request in scenario.requests)
    fraction = rng.choice((None, min(1.0, (needed + 0.01) / limits.num_blocks), 1.0))
    quotas = TenantLimits(max_running=rng.choice((None, 1, 2)), cache_fraction=fraction)
    arrivals = {turn: [_renamed(request, rng) for request in requests] for turn, requests in scenario.arrivals.items()}
    return replace(scenario, limits=replace(limits, tenants=quotas), arrivals=arrivals)


def _max_tokens(request: AddRequest, max_model_len: int) -> int:
    params = request.params
    return max_model_len if params.max_tokens is None else len(request.prompt_token_ids) + params.max_tokens


def _renamed(request: AddRequest, rng: random.Random) -> AddRequest:
    return replace(request, tenant=rng.choice((None, "a", "a", "b")), cache_salt=None)


@pytest.mark.parametrize("has_host_tier", [False, True], ids=["no host tier", "host tier"])
def test_quotas_change_no_token_no_count_and_no_block_within_a_share(has_host_tier: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    evictions = _watch_evictions(monkeypatch)
    paths: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        scenario = make_quota_scenario(seed, has_host_tier=has_host_tier)
        with monkeypatch.context() as patch:
            _watch_plans(patch, scenario)
            driver = run_scenario(scenario)
        check_outcome(scenario, driver)
        paths += rare_paths(scenario, driver)
        paths["waits for a quota"] += sum(event.reason == "tenant_quota" for event in driver.events_of(PassedOver))
        paths["is let go"] += sum(event.reason is None for event in driver.events_of(PassedOver))
    expected = {"preemption", "protected", "eviction", "live hit", "pool hit", "abort", "overlap", "waits for a quota", "is let go"}
    assert {path for path in expected if paths[path] > 0} == expected
    assert min(evictions[kind] for kind in ("over", "own", "within")) > 0


def _watch_evictions(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts who loses a block, and checks that nobody within a share loses one to a tenant over its own."""
    seen: Counter[str] = Counter()

    def pop_first(self: ShareOrder[Any], tenant: str) -> tuple[Any, str]:
        has = Counter(self._owners.values())
        block, loser = popped(self, tenant)
        kind = "own" if loser == tenant else "over" if has[loser] > self._share else "within"
        assert kind != "within" or has[tenant] < self._share, f"{tenant!r} takes a block of {loser!r} beyond its share"
        seen[kind] += 1
        return block, loser

    popped = ShareOrder.pop_first
    patch.setattr(ShareOrder, "pop_first", pop_first)
    return seen


def _watch_plans(patch: pytest.MonkeyPatch, scenario: Scenario) -> None:
    """After each plan no tenant runs more than its quota, and those told in bulk to wait for one say so themselves."""

    def schedule(self: Scheduler, now_s: float) -> Any:
        can_plan = self.can_schedule and self.next_wake_s(now_s) is None
        plan = planned(self, now_s)
        per_tenant = Counter(request.tenant for request in self._state.running)
        assert max(per_tenant.values(), default=0) <= (scenario.limits.tenants.max_running or math.inf)
        if can_plan:
            each = Counter(self.waiting_reason(request.request_id) for request in self._state.waiting)
            told = self._admission.waiting_by_reason()
            assert sum(told.values()) == each.total()
            assert self._state.waiting.num_held <= told.get("tenant_quota", 0) <= each["tenant_quota"]
        return plan

    planned = Scheduler.schedule
    patch.setattr(Scheduler, "schedule", schedule)


@given(seed=st.integers(0, 2**20))
@settings(max_examples=20, deadline=None)
def test_waiting_requests_are_counted_once_each_at_any_moment(seed: int) -> None:
    driver = run_scenario(make_quota_scenario(seed, has_host_tier=False))
    assert all(sum(step.waiting_by_reason.values()) == step.num_waiting for step in driver.steps)


def _evicted(driver: Driver) -> Iterator[BlockEvicted]:
    yield from driver.events_of(BlockEvicted)


@pytest.mark.parametrize("seed", range(10))
def test_quotas_that_nobody_reaches_decide_nothing(seed: int) -> None:
    scenario = make_scenario(seed)
    blocks = scenario.limits.num_blocks
    wide = replace(scenario.limits, tenants=TenantLimits(max_running=10**6, max_waiting=10**6, cache_fraction=1.0))
    plain, bounded = run_scenario(scenario), run_scenario(replace(scenario, limits=wide))
    assert blocks == wide.tenants.share_blocks(blocks)
    assert bounded.tokens == plain.tokens
    assert [(e.block_hash, e.now_s) for e in _evicted(bounded)] == [(e.block_hash, e.now_s) for e in _evicted(plain)]
    assert [e.request_id for e in bounded.events_of(Admitted)] == [e.request_id for e in plain.events_of(Admitted)]
