"""`pagedcore bench throughput`, `latency` and `prefix` on an engine without a model, and with a clock of the test's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagedcore.commands.bench import engine_rounds
from pagedcore.commands.bench.engine_rounds import EngineRounds, empty_prefix_cache
from pagedcore.commands.bench.latency import LatencyWork, measure_latency, per_token_ms
from pagedcore.commands.bench.lengths import Lengths
from pagedcore.commands.bench.prefix import PrefixWork, measure_prefix
from pagedcore.commands.bench.spread import Spread
from pagedcore.commands.bench.throughput import ThroughputWork, measure_throughput
from pagedcore.commands.bench.workloads import BenchRequest, Load
from pagedcore.errors import ConfigError, EngineError, PromptTooLongError, StepFailedError
from support.engine_builder import Built, make_engine


@pytest.fixture
def build() -> Iterator[Callable[..., Built]]:
    made: list[Built] = []

    def one(**options: Any) -> Built:
        made.append(make_engine(**options))
        return made[-1]

    yield one
    for built in made:
        built.engine.close_sync()


class Progress:
    """Remembers what it was told last, by what it is of."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[int, int]] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        self.last[what] = (done, total)


def clock(*steps_s: float) -> Callable[[], float]:
    """Each round takes the next of these times, and again from the first."""
    steps = itertools.cycle(steps_s)
    times = itertools.accumulate(itertools.chain([0.0], itertools.chain.from_iterable((next(steps), 0.0) for _ in itertools.count())))
    return lambda: next(times)


def load(count: int = 1, prompt: int = 8, output: int = 4, shared: int = 0) -> Load:
    return Load(num_prompts=count, prompt_tokens=Lengths(prompt, prompt), output_tokens=Lengths(output, output), num_shared_tokens=shared)


def requests(count: int, prompt: int = 8, output: int = 4) -> list[BenchRequest]:
    return load(count, prompt, output).requests(41)


def nothing() -> None:
    return None


def test_a_round_answers_every_request_with_so_many_in_flight(build: Callable[..., Built]) -> None:
    built = build()
    seen: list[int] = []
    ended = itertools.count(1)

    def advance() -> None:
        next(ended)
        seen.append(built.engine.front.num_open)

    result = EngineRounds(built.engine).run(requests(10), 3, advance)
    assert next(ended) == 11
    assert result.num_output_tokens == 40
    assert result.num_prompt_tokens == 80
    assert len(result.first_token_s) == len(result.per_output_token_s) == 10
    assert built.engine.front.num_open == 0
    assert max(seen) <= 3


def test_the_clock_is_read_around_the_requests_alone(build: Callable[..., Built]) -> None:
    assert EngineRounds(build().engine, clock=clock(2.5)).run(requests(5), 5, nothing).wall_s == 2.5


def test_each_round_begins_with_an_empty_prefix_cache(build: Callable[..., Built]) -> None:
    rounds = EngineRounds(build().engine)
    for _ in range(2):
        assert rounds.run(requests(2, prompt=32), 2, nothing).num_cached_tokens == 0


def test_a_request_that_can_never_fit_is_refused_before_anything_runs(build: Callable[..., Built]) -> None:
    built = build(max_model_len=16)
    with pytest.raises(PromptTooLongError):
        EngineRounds(built.engine).run([*requests(2), *requests(1, prompt=15)], 2, nothing)
    assert built.engine.stats().prompt_tokens == 0


def test_a_failed_request_ends_the_round_and_leaves_none_open(build: Callable[..., Built]) -> None:
    built = build()
    built.runner.submit_errors.append(RuntimeError("the card is gone"))
    with pytest.raises(StepFailedError, match="the card is gone"):
        EngineRounds(built.engine).run(requests(6), 2, nothing)
    assert built.engine.front.num_open == 0


def test_a_cache_that_cannot_be_emptied_is_an_error_and_no_number(build: Callable[..., Built], monkeypatch: pytest.MonkeyPatch) -> None:
    built = build()
    monkeypatch.setattr(engine_rounds, "MAX_EMPTYING_S", 0.0)
    monkeypatch.setattr(built.engine, "reset_prefix_cache", lambda: False)
    with pytest.raises(EngineError, match="could not be emptied"):
        empty_prefix_cache(built.engine)


def test_throughput_is_a_point_for_each_number_in_flight_by_the_median_round(build: Callable[..., Built]) -> None:
    built, progress = build(), Progress()
    work = ThroughputWork(load=load(), num_prompts=None, concurrency=[1, 2], rounds=3)
    # a warm-up that is not counted, then rounds of 1, 4 and 2 seconds
    first, second = measure_throughput(EngineRounds(built.engine, clock=clock(100.0, 1.0, 4.0, 2.0)), work, progress)
    assert (first["concurrency"], first["num_requests"], first["num_output_tokens"]) == (1, 4, 16)
    assert (second["concurrency"], second["num_requests"], second["num_output_tokens"]) == (2, 8, 32)
    assert first["output_tokens_per_s"] == Spread(8.0, (16.0, 4.0, 8.0))
    assert second["tokens_per_s"] == Spread(48.0, (96.0, 24.0, 48.0))
    assert first["wall_s"] == Spread(2.0, (1.0, 4.0, 2.0))
    assert first["cached_fraction"] == 0.0
    assert progress.last == {"1 in flight": (12, 12), "2 in flight": (24, 24)}


def test_throughput_without_numbers_sends_sixteen_at_once_or_those_that_are_asked_for() -> None:
    options = {"load": load(), "rounds": 1}
    assert [(n, each.num_prompts) for n, each in ThroughputWork(num_prompts=None, concurrency=None, **options).loads()] == [(16, 16)]
    assert [(n, each.num_prompts) for n, each in ThroughputWork(num_prompts=3, concurrency=None, **options).loads()] == [(3, 3)]
    assert [(n, each.num_prompts) for n, each in ThroughputWork(num_prompts=7, concurrency=[2, 4], **options).loads()] == [(2, 7), (4, 7)]


def test_more_in_flight_than_run_at_once_is_refused(build: Callable[..., Built]) -> None:
    work = ThroughputWork(load=load(), num_prompts=None, concurrency=[2, 8], rounds=1)
    with pytest.raises(ConfigError, match="--concurrency 8 is more than max_num_seqs, 4"):
        measure_throughput(EngineRounds(build(max_num_seqs=4).engine), work, Progress())


def test_a_tokens_latency_is_the_difference_of_medians_over_the_tokens_after_the_first() -> None:
    # medians 2 and 5; the rounds' own differences are 1, 8 and 2 over 3 tokens
    latency = per_token_ms([1.0, 2.0, 3.0], [2.0, 10.0, 5.0], 4)
    assert latency.value == 1000.0
    assert latency.rounds == (pytest.approx(1000 / 3), pytest.approx(8000 / 3), pytest.approx(2000 / 3))


def test_latency_is_measured_at_each_batch_and_context(build: Callable[..., Built]) -> None:
    built, progress = build(), Progress()
    work = LatencyWork(batches=[1, 2], contexts=[8, 16], num_output_tokens=3, rounds=2)
    # a warm-up, then one token and three tokens, twice
    points = measure_latency(EngineRounds(built.engine, clock=clock(50.0, 1.0, 2.0, 3.0, 6.0)), work, progress)
    assert [(point["batch"], point["context"]) for point in points] == [(1, 8), (1, 16), (2, 8), (2, 16)]
    assert points[0]["first_token_ms"] == Spread(2000.0, (1000.0, 3000.0))
    assert points[0]["whole_s"] == Spread(4.0, (2.0, 6.0))
    assert points[3]["per_token_ms"] == Spread(1000.0, (500.0, 1500.0))
    assert progress.last["batch 2, context 16"] == (8, 8)


def test_a_batch_that_the_pool_cannot_hold_is_refused(build: Callable[..., Built]) -> None:
    work = LatencyWork(batches=[5], contexts=[28], num_output_tokens=5, rounds=1)
    with pytest.raises(ConfigError, match="A batch of 5 with 33 tokens each needs 25 KV blocks and the pool has 24"):
        measure_latency(EngineRounds(build(num_blocks=24).engine), work, Progress())


def test_a_latency_of_one_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="--output-tokens is 1"):
        LatencyWork(batches=[1], contexts=[1], num_output_tokens=1, rounds=1)


@pytest.mark.parametrize(("caches", "hit_rate"), [(True, 0.5), (False, None)])
def test_prefix_tells_the_engines_own_hit_rate(build: Callable[..., Built], caches: bool, hit_rate: float | None) -> None:
    built = build(enable_prefix_caching=caches, max_num_batched_tokens=32)
    EngineRounds(built.engine).run(requests(4, prompt=24), 4, nothing)  # earlier traffic, which is not counted
    work = PrefixWork(load=load(4, prompt=24, output=2, shared=16), rounds=2)
    point = measure_prefix(EngineRounds(built.engine, clock=clock(9.0, 1.0, 3.0)), work, Progress())
    assert point["prefix_caching"] is caches
    assert point["wall_s"] == Spread(2.0, (1.0, 3.0))
    assert point["output_tokens_per_s"] == Spread(pytest.approx((8 + 8 / 3) / 2), (8.0, pytest.approx(8 / 3)))
    rate = point["hit_rate"]
    assert isinstance(rate, Spread)
    assert len(rate.rounds) == 2
    if caches:
        assert rate == Spread(hit_rate, (hit_rate, hit_rate))
        assert point["num_cached_tokens"] == 48
    else:
        assert point["num_cached_tokens"] == 0
