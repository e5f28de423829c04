"""What the prefix cache saves on the real model, counted at the device's door."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from pagedcore import LLM, RequestOutput, SamplingParams, StatsSnapshot
from pagedcore.core.step import StepPlan
from support.parity import assert_partition, real_llm

pytestmark = pytest.mark.model

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
WAIT_S = 120.0


def prompt_of(length: int, first: int = 1000) -> list[int]:
    """Token ids that no other `first` shares."""
    return [first, *range(5000, 5000 + length - 1)]


@dataclass
class Door:
    """Sees each step on its way to the device; may hold one of them back."""

    num_tokens: list[int] = field(default_factory=list)
    num_rows: list[int] = field(default_factory=list)
    holds: Callable[[Door], bool] = lambda door: False
    is_held: threading.Event = field(default_factory=threading.Event)
    may_pass: threading.Event = field(default_factory=threading.Event)

    def see(self, plan: StepPlan) -> None:
        self.num_tokens.append(sum(plan.num_tokens))
        self.num_rows.append(len(plan.rows))
        if not self.is_held.is_set() and self.holds(self):
            self.is_held.set()
            assert self.may_pass.wait(WAIT_S)


@contextmanager
def door_of(llm: LLM, holds: Callable[[Door], bool] = lambda door: False) -> Iterator[Door]:
    runner: Any = llm.engine.loop._runner
    door, submit = Door(holds=holds), runner.submit

    def seen(plan: StepPlan) -> Any:
        door.see(plan)
        return submit(plan)

    runner.submit = seen
    try:
        yield door
    finally:
        door.may_pass.set()
        del runner.submit


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_the_second_request_computes_exactly_what_the_formula_says(block_size: int) -> None:
    with real_llm(block_size=block_size, num_kv_blocks=4096 // block_size) as llm:
        for length in (1, block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1, 150):
            prompt = prompt_of(length, first=1000 + length)
            first = llm.generate(prompt, ONE_TOKEN)[0]
            before = llm.stats()
            with door_of(llm) as door:
                second = llm.generate(prompt, ONE_TOKEN)[0]
            computed = length - block_size * ((length - 1) // block_size)
            assert sum(door.num_tokens) == computed
            _check_second(second, llm.stats() - before, length, computed)
            assert second.outputs[0].token_ids == first.outputs[0].token_ids
            assert_partition(first, block_size)
            assert_partition(second, block_size)


def _check_second(output: RequestOutput, during: StatsSnapshot, length: int, computed: int) -> None:
    cache = output.cache
    assert cache is not None
    assert (cache.computed_tokens, cache.pool_tokens, cache.live_tokens) == (computed, length - computed, 0)
    assert output.num_cached_tokens == length - computed
    assert (during.prefix_cache_query_tokens, during.prefix_cache_hit_tokens) == (length, length - computed)
    assert during.computed_prompt_tokens == computed


@pytest.mark.slow
def test_64_live_requests_with_one_prefix_hold_and_compute_it_once() -> None:
    prefix, num_requests, new_tokens = prompt_of(1024), 64, 4
    prompts = [[*prefix, 2000 + index, *range(3000, 3007)] for index in range(num_requests)]  # 8 tokens of their own
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    outputs: list[RequestOutput] = []
    # The second step of all rows is held: the first one's commit has told their numbers.
    with real_llm(block_size=16) as llm, door_of(llm, lambda door: door.num_rows.count(num_requests) == 2) as door:
        thread = threading.Thread(target=lambda: outputs.extend(llm.generate(prompts, params)))
        thread.start()
        assert door.is_held.wait(WAIT_S)
        running = llm.stats()
        door.may_pass.set()
        thread.join()
        ended = llm.stats()
    assert (running.num_running, running.num_waiting) == (num_requests, 0)
    assert running.num_active_blocks == 1024 // 16 + num_requests  # the prefix, and one block each
    assert sum(door.num_tokens) == 1024 + num_requests * (8 + new_tokens - 1)
    reports = [output.cache for output in outputs]
    assert sorted(report.live_tokens for report in reports if report is not None) == [0, *[1024] * 63]
    assert ended.prefix_cache_hit_tokens_by_source["live"] == 63 * 1024
    assert ended.prefix_cache_hit_tokens_by_source.get("pool", 0) == 0
    assert ended.hit_rate("prefix") == pytest.approx(63 * 1024 / (64 * 1032))
    assert ended.num_active_blocks == 0
    for output in outputs:
        assert_partition(output, 16)


def test_hits_say_whether_the_block_had_an_owner() -> None:
    prompt = prompt_of(100)
    with real_llm(block_size=16) as llm:
        stream = llm.engine.generate_sync(prompt, SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True))
        next(stream)
        live = llm.generate([*prompt[:80], *range(700, 720)], ONE_TOKEN)[0].cache
        stream.close()  # type: ignore[attr-defined]
        llm.check()
        pool = llm.generate([*prompt[:48], *range(800, 820)], ONE_TOKEN)[0].cache
        stats = llm.stats()
    assert live is not None
    assert pool is not None
    assert (live.live_tokens, live.pool_tokens, live.computed_tokens) == (80, 0, 20)
    assert (pool.live_tokens, pool.pool_tokens, pool.computed_tokens) == (0, 48, 20)
    assert dict(stats.prefix_cache_hit_tokens_by_source) == {"live": 80, "pool": 48, "host": 0}
    assert live.diverged_at_token == 80
    assert pool.diverged_at_token == 48


def test_the_partition_is_exact_also_for_requests_that_are_given_up() -> None:
    long = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    outputs: list[RequestOutput] = []
    with real_llm(block_size=16, max_num_batched_tokens=64) as llm:
        for length in (200, 90):
            stream = llm.engine.generate_sync(prompt_of(length), long)
            next(stream)
            stream.close()  # type: ignore[attr-defined]
        with door_of(llm, lambda door: len(door.num_tokens) == 2) as door:
            thread = threading.Thread(target=lambda: outputs.extend(llm.engine.generate_sync(prompt_of(700, first=999), long, "given-up")))
            thread.start()
            assert door.is_held.wait(WAIT_S)
            llm.engine.abort_sync("given-up")
            door.may_pass.set()
            thread.join()
        llm.check()
        stats = llm.stats()
    cache = outputs[-1].cache
    assert cache is not None
    assert outputs[-1].status == "aborted"
    assert (cache.computed_tokens, cache.abandoned_tokens) == (128, 572)  # two chunks of 64
    assert_partition(outputs[-1], 16)
    assert (stats.prefix_cache_query_tokens, stats.prefix_cache_hit_tokens) == (990, 80)
    assert (stats.computed_prompt_tokens, stats.abandoned_prompt_tokens) == (200 + 10 + 128, 572)


def test_prompt_logprobs_read_no_cache_and_say_so() -> None:
    with real_llm(block_size=16) as llm:
        prompt = prompt_of(40)
        llm.generate(prompt, ONE_TOKEN)
        output = llm.generate(prompt, ONE_TOKEN.replace(prompt_logprobs=1))[0]
    assert output.cache is not None
    assert (output.num_cached_tokens, output.cache.computed_tokens, output.cache.miss_blocks) == (0, 40, {"disabled": 2})


def test_salts_share_nothing_and_choices_are_one_lookup() -> None:
    with real_llm(block_size=16) as llm:
        prompt = prompt_of(40)
        salted = llm.generate([prompt, prompt], ONE_TOKEN, cache_salt=["a", "b"])
        assert [output.num_cached_tokens for output in salted] == [0, 0]
        assert llm.generate(prompt, ONE_TOKEN, cache_salt="a")[0].num_cached_tokens == 32
        before = llm.stats()
        with door_of(llm) as door:
            output = llm.generate(prompt, SamplingParams(n=4, seed=1, max_tokens=3, ignore_eos=True))[0]
        during = llm.stats() - before
    assert len(output.outputs) == 4
    assert during.prefix_cache_query_tokens == 40
    assert during.generation_tokens == 12
    assert sum(door.num_tokens) == 40 + 3 * 8 + 4 * 2  # the prompt once; of each further choice its last, partial block
