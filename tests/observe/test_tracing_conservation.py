"""The real scheduler under random traffic: every life has one end, and its waits are those that a look at every request would find."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedcore.tenancy.limits import NO_TENANT_LIMITS, TenantLimits
from pagedcore.tracing.history import History
from support.core_builders import Driver, make_request

NUM_TURNS = 40
MAX_BLOCKS_OF_A_REQUEST = 6


@dataclass
class WatchedTraffic:
    """A scheduler, its history, and a count of waits that asks the scheduler about each waiting request after each plan."""

    driver: Driver
    history: History
    takes_late: bool
    """Plan and commit of a turn come in one batch of events, as the engine loop takes them."""
    num_arrived: int = 0
    num_recorded: int = 0
    reasons: dict[str, str] = field(default_factory=dict)
    """What each waiting request waits for since the last plan."""
    waited_s: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    since_s: dict[str, float] = field(default_factory=dict)

    def add(self, prompt: list[int], max_tokens: int, priority: int) -> None:
        name = f"r{self.num_arrived}"
        self.num_arrived += 1
        now_s, has_quotas = self.driver.now_s, self.driver.scheduler.limits.tenants != NO_TENANT_LIMITS
        tenant = "flood" if has_quotas and self.num_arrived % 3 else None
        request = make_request(name, prompt, max_tokens=max_tokens, priority=priority, tenant=tenant, arrival_s=now_s - 0.25)
        self.driver.scheduler.add(request, now_s)
        self.driver.take()
        self.reasons[name], self.since_s[name] = "next_step", now_s - 0.25
        self.record()

    def abort(self, name: str) -> None:
        self.driver.scheduler.abort(name, self.driver.now_s)
        self.driver.take()
        self._settle(waiting=self._waiting())
        self.record()

    def turn(self) -> None:
        driver = self.driver
        driver.now_s += 1.0
        can_plan = driver.scheduler.can_schedule
        plan = driver.schedule()
        if can_plan:
            self._settle(waiting={})
            self.reasons = {name: driver.scheduler.waiting_reason(name) or "" for name in self._waiting()}
            self.since_s = dict.fromkeys(self.reasons, driver.now_s)
        if not self.takes_late:
            self.record()
        if driver.in_flight and (plan is None or len(driver.in_flight) >= driver.scheduler.limits.num_in_flight_steps):
            driver.now_s += 0.5
            driver.commit()
            self._settle(waiting=self._waiting())
        self.record()

    def record(self) -> None:
        steps = self.driver.steps[self.num_recorded :]
        self.num_recorded = len(self.driver.steps)
        if self.takes_late and steps:
            planned_s = next((step.planned_s for step in steps if step.planned_s is not None), None)
            steps = [replace(steps[-1], events=[event for step in steps for event in step.events], planned_s=planned_s)]
        for step in steps:
            self.history.record(step)

    def _waiting(self) -> dict[str, None]:
        return {request.request_id: None for request in self.driver.scheduler._state.waiting}

    def _settle(self, waiting: dict[str, None]) -> None:
        """Count the wait until now of each request that is not among those that go on waiting."""
        for name in [name for name in self.reasons if name not in waiting]:
            self.waited_s[name][self.reasons.pop(name)] += self.driver.now_s - self.since_s.pop(name)


@st.composite
def _limits(draw: st.DrawFn) -> dict[str, object]:
    num_blocks = draw(st.integers(6, 16))
    share = min(1.0, MAX_BLOCKS_OF_A_REQUEST / num_blocks + 0.001)
    quotas = TenantLimits(max_running=draw(st.sampled_from([None, 1, 2])), cache_fraction=draw(st.sampled_from([None, share])))
    return {
        "num_blocks": num_blocks,
        "tenants": draw(st.sampled_from([NO_TENANT_LIMITS, quotas])),
        "max_num_seqs": draw(st.integers(1, 4)),
        "max_num_batched_tokens": draw(st.integers(4, 24)),
        "max_chunk_tokens": draw(st.sampled_from([None, 3, 8])),
        "num_in_flight_steps": draw(st.sampled_from([1, 2])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "max_model_len": 24,
        "max_batch_wait_s": draw(st.sampled_from([0.0, 0.0, 1.5, 4.0])),
    }


@given(limits=_limits(), takes_late=st.booleans(), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_arrival_has_one_end_and_waits_for_what_the_scheduler_says(limits: dict[str, object], takes_late: bool, seed: int) -> None:
    _run(limits, random.Random(seed), takes_late=takes_late)


def test_the_traffic_takes_the_rare_paths() -> None:
    seen: Counter[str] = Counter()
    for seed in range(16):
        quotas = TenantLimits(max_running=1) if seed >= 12 else NO_TENANT_LIMITS
        limits = {"num_blocks": 7, "max_num_seqs": 3, "max_num_batched_tokens": 12, "max_model_len": 24, "tenants": quotas}
        limits["max_batch_wait_s"] = 1.5 if seed % 4 == 2 else 0.0
        policy = "priority" if seed % 2 else "fcfs"
        traffic = _run(
            {**limits, "scheduling_policy": policy, "num_in_flight_steps": 1 + seed % 2}, random.Random(seed), takes_late=seed % 3 == 0
        )
        for life in traffic.history.lives():
            seen.update(event.name for event in life.events)
            seen.update(life.waited_s)
            seen[life.status] += 1
    reasons = ("blocks", "max_num_seqs", "token_budget", "tenant_quota", "priority", "batch_window", "next_step")
    for name in ("preempted", "resumed", "passed_over", *reasons, "aborted"):
        assert seen[name] > 0, f"never saw {name}"


def _run(limits: dict[str, object], rng: random.Random, *, takes_late: bool) -> WatchedTraffic:
    driver = Driver.make(**limits)
    traffic = WatchedTraffic(driver, History(lambda _: None, clock=lambda: driver.now_s), takes_late)
    _play(traffic, rng, uses_priority=limits["scheduling_policy"] == "priority")
    lives = traffic.history.lives()
    assert Counter(life.request.request_id for life in lives) == Counter({f"r{i}": 1 for i in range(traffic.num_arrived)})
    for life in lives:
        names = [event.name for event in life.events]
        times = [event.at_s for event in life.events]
        assert names[:2] == ["arrived", "queued"]
        assert names.count("finished") == 1
        assert names[-1] == "finished"
        assert times == sorted(times)
        assert names.count("preempted") == life.num_preemptions
        expected = {reason: seconds for reason, seconds in traffic.waited_s[life.request.request_id].items() if seconds}
        assert life.waited_s == pytest.approx(expected)
        stretches = sum(end - start for name, start, end in life.phases(0.0) if name in ("queue", "preempted"))
        assert sum(life.waited_s.values()) == pytest.approx(stretches)
    assert not traffic.history._running
    assert not traffic.history._waits._unseen
    return traffic


def _play(traffic: WatchedTraffic, rng: random.Random, *, uses_priority: bool) -> None:
    for turn in range(NUM_TURNS):
        if turn < NUM_TURNS // 2 and rng.random() < 0.5:
            stem = [rng.randrange(2)] * rng.randrange(0, 9)
            prompt = [*stem, *(rng.randrange(50) for _ in range(rng.randrange(1, 7)))]
            traffic.add(prompt, max_tokens=rng.randrange(1, 9), priority=rng.randrange(3) if uses_priority else 0)
        if traffic.num_arrived and rng.random() < 0.05:
            traffic.abort(f"r{rng.randrange(traffic.num_arrived)}")
        traffic.turn()
    for _ in range(2000):
        if not traffic.driver.scheduler.has_work:
            return
        traffic.turn()
    raise AssertionError("the traffic never ended")
