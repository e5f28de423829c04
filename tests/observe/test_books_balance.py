"""The real scheduler under random traffic: whatever happens, the books of observe balance."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry

from pagedcore.core.limits import SchedulerLimits
from pagedcore.core.scheduler import Scheduler
from pagedcore.core.step import StepPlan, StepResult
from pagedcore.messages import AddRequest
from pagedcore.observe.recorder import Recorder, RecorderInfo
from pagedcore.sampling_params import SamplingParams
from support.observed import FakeClock, make_add

NUM_REQUESTS = 60


class Traffic:
    """A scheduler and a recorder under requests with common stems, several choices, aborts and early stops."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock(0.0)
        limits = SchedulerLimits(
            block_size=4,
            num_blocks=24,
            max_model_len=80,
            max_num_seqs=6,
            max_num_batched_tokens=24,
            max_chunk_tokens=8,
            max_prefix_wait_steps=32 * (seed % 2),
        )
        self.scheduler = Scheduler(limits)
        info = RecorderInfo(model_name="m", block_size=4, num_blocks=24)
        self.recorder = Recorder(info, registry=CollectorRegistry(), clock=self.clock)
        self.num_requests = self.num_lookups = 0

    def run(self) -> None:
        while self.num_requests < NUM_REQUESTS or self.scheduler.has_work:
            self.clock.now_s += 0.01
            if self.num_requests < NUM_REQUESTS and self.rng.random() < 0.4:
                self._send()
            self._end_one_early()
            plan = self.scheduler.schedule(self.clock.now_s)
            if plan is not None:
                self.scheduler.commit(plan, self._result(plan), self.clock.now_s)
            self.recorder.record(self.scheduler.take_events())
            for update in self.scheduler.take_updates():
                if update.cache is not None:
                    self._check(update.request_id, update.finish_reason is not None)

    def _send(self) -> None:
        rng, name = self.rng, f"r{self.num_requests}"
        self.num_requests += 1
        stem = [rng.randrange(2)] * rng.randrange(1, 30)
        prompt = stem + [rng.randrange(100) for _ in range(rng.randrange(1, 12))]
        num_choices = rng.choice([1, 1, 1, 2])
        params = SamplingParams(seed=0, max_tokens=rng.randrange(1, 20), prompt_logprobs=rng.choice([None, None, None, 1]))
        for index in range(num_choices):
            base = make_add(name if not index else f"{name}#{index}", group=name, arrival_s=self.clock.now_s)
            self.scheduler.add(_with(base, prompt, params, index, num_choices, rng.choice([None, "t"])), self.clock.now_s)

    def _end_one_early(self) -> None:
        name = f"r{self.rng.randrange(max(self.num_requests, 1))}"
        if self.rng.random() < 0.05:
            self.scheduler.abort(name, self.clock.now_s)
        elif self.rng.random() < 0.05:
            self.scheduler.finish(name, 1, "stop", self.clock.now_s)

    def _result(self, plan: StepPlan) -> StepResult:
        return StepResult(step_id=plan.step_id, sampled_token_ids=[self.rng.randrange(100) for needs in plan.samples if needs])

    def _check(self, request_id: str, is_final: bool) -> None:
        """Every report is a partition, and its misses are its eligible blocks that were not served."""
        report = self.recorder.cache_report(request_id)
        if report is None:
            return
        self.num_lookups += is_final
        parts = report.num_cached_tokens + report.computed_tokens + report.abandoned_tokens
        assert parts == report.num_prompt_tokens
        assert report.num_cached_tokens // 4 + sum(report.miss_blocks.values()) == report.num_eligible_blocks


def _with(base: AddRequest, prompt: list[int], params: SamplingParams, index: int, num_choices: int, tenant: str | None) -> AddRequest:
    return AddRequest(
        request_id=base.request_id,
        group_id=base.group_id,
        prompt_token_ids=prompt,
        params=params,
        arrival_s=base.arrival_s,
        choice_index=index,
        num_choices=num_choices,
        tenant=tenant,
    )


@pytest.mark.parametrize("seed", range(6))
def test_queries_are_hits_computed_and_abandoned_and_every_miss_has_a_reason(seed: int) -> None:
    traffic = Traffic(seed)
    traffic.run()
    stats = traffic.recorder.stats()
    assert traffic.num_lookups > NUM_REQUESTS // 2
    assert stats.prefix_cache_query_tokens == stats.prefix_cache_hit_tokens + stats.computed_prompt_tokens + stats.abandoned_prompt_tokens
    assert stats.page_lookups == stats.prefix_cache_hit_tokens // 4 + sum(stats.miss_blocks.values())
    assert stats.prefix_cache_hit_tokens <= stats.ideal_hit_tokens <= stats.prefix_cache_query_tokens
    assert stats.prefix_cache_hit_tokens <= 4 * stats.page_hits
    assert sum(stats.num_finished.values()) == traffic.num_requests
    assert (stats.num_running, stats.num_waiting, stats.num_active_blocks) == (0, 0, 0)
    assert (stats.miss_blocks["in_flight"] > 0) == (seed % 2 == 0)  # even seeds never wait for a prefix that is being computed
    assert stats.miss_penalty_tokens["evicted"] <= 4 * stats.miss_blocks["evicted"]
    for name, count in (("hits", stats.prefix_cache_hit_tokens), ("evictions", stats.pool_evictions), ("ghosts", stats.pool_ghost_hits)):
        assert count > 0, f"the traffic never made {name}"
    assert not traffic.recorder._requests._open
    assert not traffic.recorder._requests._groups
