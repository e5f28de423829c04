"""Whatever the real scheduler goes through, the sums come out: preemption, swap, abort, failed steps, retry and overlap, drawn by seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from pagedcore.core.events import Admitted, Arrived, Event, Finished, Preempted, Resumed, StepEvents
from pagedcore.core.limits import SchedulerLimits
from pagedcore.metrics_compat.ledgers import VllmLedger
from pagedcore.observe.recorder import Recorder, RecorderInfo
from pagedcore.observe.stats import StatsSnapshot
from pagedcore.tracing.history import History
from support.observed import FakeClock, make_add, make_finished, samples_of_registry
from support.scenarios import make_scenario, rare_paths, run_scenario
from support.search import examples

NUM_SEEDS_OF_RARE_PATHS = 60


@dataclass
class Books:
    """What one run made of the recorder and the history, and the run's own events."""

    limits: SchedulerLimits
    recorder: Recorder
    registry: CollectorRegistry
    history: History
    events: list[Event] = field(default_factory=list)
    steps: list[StepEvents] = field(default_factory=list)

    @property
    def stats(self) -> StatsSnapshot:
        return self.recorder.stats()

    def of(self, kind: type) -> list:  # type: ignore[type-arg]
        return [event for event in self.events if isinstance(event, kind)]

    def totals(self) -> Counter[str]:
        """Sample name -> the sum over its labels, of a scrape."""
        totals: Counter[str] = Counter()
        for key, value in samples_of_registry(self.registry).items():
            totals[key.partition("{")[0]] += value  # type: ignore[assignment]
        return totals


def keep_books(seed: int, *, has_host_tier: bool, num_rounds: int) -> Books:
    """Play a seed's scenario and record it, `num_rounds` times: then each id comes again, as a client's retry does."""
    scenario = make_scenario(seed, has_host_tier=has_host_tier)
    driver = run_scenario(scenario)
    limits, clock, registry = scenario.limits, FakeClock(0.0), CollectorRegistry()
    info = RecorderInfo(model_name="m", block_size=limits.block_size, num_blocks=limits.num_blocks)
    recorder = Recorder(info, registry=registry, clock=clock, ledger=VllmLedger())
    books = Books(limits, recorder, registry, History(recorder.cache_report, clock=clock))
    recorder.add_listener(books.history.record)
    for _ in range(num_rounds):
        for step in [_refusal(driver.now_s), *driver.steps]:
            clock.now_s = max(clock.now_s, step.now_s)
            recorder.record(step)
            stats = recorder.stats()
            assert step is driver.steps[-1] or stats.num_active_blocks + stats.num_cached_blocks + stats.num_free_blocks in (
                0,
                limits.num_blocks,
            )
            books.steps.append(step)
            books.events += step.events
    recorder.flush()
    return books


def _refusal(now_s: float) -> StepEvents:
    refused = make_add("refused", num_tokens=500, arrival_s=now_s)
    events = [Arrived(refused, now_s), make_finished(refused, now_s, "rejected", reject_reason="too_long", num_abandoned_prompt_tokens=500)]
    return StepEvents(now_s=now_s, events=events)


def check_tokens(books: Books) -> None:
    """T = live + pool + host + computed + abandoned, of all and of each; what is computed again is apart."""
    stats = books.stats
    lookups = [event.lookup for event in books.of(Admitted) if event.lookup is not None]
    assert stats.prefix_cache_query_tokens == sum(lookup.num_prompt_tokens for lookup in lookups)
    assert stats.prefix_cache_query_tokens == stats.prefix_cache_hit_tokens + stats.computed_prompt_tokens + stats.abandoned_prompt_tokens
    assert stats.prefix_cache_hit_tokens_by_source == {
        source: books.limits.block_size * sum(getattr(lookup, f"{source}_blocks") for lookup in lookups)
        for source in ("live", "pool", "host")
    }
    assert stats.prefix_cache_hit_tokens <= stats.ideal_hit_tokens <= stats.prefix_cache_query_tokens <= stats.prompt_tokens
    assert stats.recomputed_tokens == sum(event.num_recomputed_tokens for event in books.of(Resumed))
    assert stats.num_preemptions == len(books.of(Preempted))
    for request_id in {event.request.request_id for event in books.of(Finished)}:
        report = books.recorder.cache_report(request_id)
        if report is not None:
            assert report.num_prompt_tokens == report.num_cached_tokens + report.computed_tokens + report.abandoned_tokens


def check_blocks(books: Books) -> None:
    """Eligible = hits + misses, one reason each; acquisitions = reused + fresh; what went out to host memory and came back."""
    stats, block_size = books.stats, books.limits.block_size
    num_hit_blocks = stats.prefix_cache_hit_tokens // block_size
    assert stats.page_lookups == num_hit_blocks + sum(stats.miss_blocks.values())
    assert stats.page_hits <= stats.page_lookups
    from_host = stats.prefix_cache_hit_tokens_by_source["host"] // block_size
    assert stats.pool_acquired_reused_blocks == num_hit_blocks - from_host  # those are copied into fresh blocks
    if not books.of(Preempted):
        held = [(event.num_held_blocks, event.num_new_blocks, event.request.choice_index) for event in books.of(Finished)]
        acquired = sum(new if choice else all_of_them for all_of_them, new, choice in held)
        assert stats.pool_acquired_reused_blocks + stats.pool_acquired_fresh_blocks == acquired
    assert stats.swapped_blocks == {
        "out": sum(step.num_swapped_out_blocks for step in books.steps),
        "in": sum(step.num_swapped_in_blocks for step in books.steps),
    }


def check_penalty(books: Books) -> None:
    """Only tokens that were computed can have been avoidable, and only those of blocks that missed so."""
    stats = books.stats
    for reason, num_tokens in stats.miss_penalty_tokens.items():
        assert num_tokens <= books.limits.block_size * stats.miss_blocks[reason]
    num_failed = sum(event.status == "error" for event in books.of(Finished))
    assert num_failed or sum(stats.miss_penalty_tokens.values()) <= stats.computed_prompt_tokens


def check_requests(books: Books) -> None:
    """Arrived = the sum of the statuses; each life has one end; every token is counted once."""
    stats = books.stats
    arrived = Counter(event.request.group_id for event in books.of(Arrived) if event.request.choice_index == 0)
    assert sum(stats.num_finished.values()) == arrived.total()
    assert stats.num_finished["rejected"] == stats.num_rejected["too_long"] == arrived["refused"]
    assert stats.generation_tokens == sum(event.num_output_tokens for event in books.of(Finished))
    assert stats.discarded_tokens == sum(event.num_discarded_tokens for event in books.of(Finished))
    assert stats.sampled_tokens <= stats.generation_tokens + stats.discarded_tokens
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert not books.recorder._requests._open
    assert not books.recorder._lookups.store._running
    lives = books.history.lives()
    assert Counter(life.request.request_id for life in lives) == Counter(event.request.request_id for event in books.of(Arrived))
    for life in lives:
        names = [event.name for event in life.events]
        assert (names[:2], names[-1], names.count("finished")) == (["arrived", "queued"], "finished", 1)
        assert [event.at_s for event in life.events] == sorted(event.at_s for event in life.events)


def check_moments(books: Books) -> None:
    """At each moment the waiting requests wait for something, one reason each, and no active slot is counted twice."""
    for step in books.steps:
        assert sum(step.waiting_by_reason.values()) == step.num_waiting
        assert step.num_swapped <= step.num_waiting
        assert 0 <= step.num_live_tokens <= step.num_active_blocks * books.limits.block_size


def _num_groups(books: Books, has_it: Callable[[Finished], bool]) -> int:
    """Requests, as their callers see them, of which some choice had it. Each round is the same, and has one refusal."""
    num_rounds = books.stats.num_finished["rejected"]
    return num_rounds * len({event.request.group_id for event in books.of(Finished) if has_it(event)})


def check_export(books: Books) -> None:
    """What a scrape shows is what was counted, under both sets of names."""
    stats, totals = books.stats, books.totals()
    ours = {
        "prefix_cache_queries_tokens_total": stats.prefix_cache_query_tokens,
        "prefix_cache_hit_tokens_total": stats.prefix_cache_hit_tokens,
        "cache_miss_blocks_total": sum(stats.miss_blocks.values()),
        "requests_total": sum(stats.num_finished.values()),
        "inter_token_latency_seconds_count": sum(len(step.inter_token_gaps_s) for step in books.steps),
        "block_lifetime_seconds_count": stats.pool_evictions,
        "step_tokens_sum": sum(step.num_tokens for step in books.steps if step.step_id is not None),
    }
    assert {name: totals[f"pagedcore_{name}"] for name in ours} == ours
    ended = [event for event in books.of(Finished) if event.status != "rejected"]
    observed = {
        "request_latency_seconds": sum(stats.num_finished.values()) - stats.num_finished["rejected"],
        "time_per_output_token_seconds": sum(event.num_output_tokens > 1 for event in ended),
        "time_in_queue_seconds": _num_groups(books, lambda event: event.admitted_s is not None),
        "time_to_first_token_seconds": _num_groups(books, lambda event: event.first_token_s is not None),
    }
    assert {name: totals[f"pagedcore_{name}_count"] for name in observed} == observed
    assert totals["vllm:request_prompt_tokens_count"] == sum(event.admitted_s is not None for event in ended)
    assert totals["vllm:request_decode_time_seconds_count"] == sum(event.first_token_s is not None for event in ended)
    assert totals["vllm:prefix_cache_hits_total"] == stats.prefix_cache_hit_tokens
    assert totals["vllm:prompt_tokens_by_source_total"] == stats.prefix_cache_query_tokens - stats.abandoned_prompt_tokens
    assert totals["vllm:request_success_total"] == sum(stats.num_finished.values()) - stats.num_finished["rejected"]
    assert totals["vllm:generation_tokens_total"] == stats.generation_tokens


@given(seed=st.integers(0, 10**6), has_host_tier=st.booleans(), num_rounds=st.sampled_from([1, 1, 2]))
@example(seed=0, has_host_tier=True, num_rounds=2)
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_sums_come_out(seed: int, has_host_tier: bool, num_rounds: int) -> None:
    books = keep_books(seed, has_host_tier=has_host_tier, num_rounds=num_rounds)
    for check in (check_tokens, check_blocks, check_penalty, check_requests, check_moments, check_export):
        check(books)


def test_the_seeds_take_the_rare_paths() -> None:
    paths: Counter[str] = Counter()
    for seed in range(NUM_SEEDS_OF_RARE_PATHS):
        scenario = make_scenario(seed, has_host_tier=seed % 2 == 0)
        paths += rare_paths(scenario, run_scenario(scenario))
    wanted = ("preemption", "resume", "eviction", "live hit", "pool hit", "host hit", "swapped out", "swapped in", "in flight miss",
              "chunked prefill", "discarded token", "abort", "error", "abandoned", "overlap")  # fmt: skip
    assert [path for path in wanted if not paths[path]] == []
