"""Depths without sampling are exact: a pool of C blocks holds a block exactly when its depth is at most C."""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore.advice.block_stack import BlockStack
from pagedcore.advice.prefix_keys import KEY_SPACE
from pagedcore.advice.prompt import Prompt
from pagedcore.advice.reuse_sketch import POOL_FACTORS, ReuseSketch


def admit(sketch: ReuseSketch, name: str, token_ids: Sequence[int], *, now: float, **facts: bool) -> None:
    sketch.admit(Prompt(request_id=name, token_ids=token_ids, **facts), now=now)


def lru_hits(uses: list[int], capacity: int) -> int:
    cache, num_hits = OrderedDict[int, None](), 0
    for block in uses:
        num_hits += block in cache
        cache[block] = None
        cache.move_to_end(block)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return num_hits


def look_up_and_use(stack: BlockStack, key: int) -> None:
    """A prompt of one block that is computed, or found, and given back at once."""
    sampled = stack.sample([key])
    stack.look_up(sampled, stack.block_size + 1, reads_cache=True)
    stack.release(stack.own(sampled))


def hits_by_capacity(stack: BlockStack) -> list[int]:
    return list(accumulate(stack.hit_tokens[:-1]))


@given(st.lists(st.integers(0, 12), max_size=120))
@settings(deadline=None, max_examples=60)
def test_depths_are_those_of_naive_lru_pools_of_every_size(uses: list[int]) -> None:
    stack = BlockStack(1, range(1, 15), 100)
    for key in uses:
        look_up_and_use(stack, key)
    assert hits_by_capacity(stack) == [lru_hits(uses, capacity) for capacity in stack.capacities]


def test_blocks_with_an_owner_and_partly_filled_ones_take_room_too() -> None:
    stack = BlockStack(8, (1, 2, 4, 8), 100)
    [first] = stack.own(stack.sample([1]))
    stack.release([first])
    assert stack.depth(first) == 1
    stack.own(stack.sample([2, 3]))
    assert stack.depth(first) == 3
    stack.note_private(2.0)
    assert stack.depth(first) == 5
    stack.note_private(0.0)
    assert stack.depth(first) == 5, "the pool had been that full"
    stack.own(stack.sample([4]))
    assert stack.depth(first) == 5, "now another block is where a partly filled one was"


def test_an_owned_block_needs_a_pool_for_all_that_runs_or_for_what_was_used_since() -> None:
    stack = BlockStack(8, (1, 2, 4, 8), 100)
    [oldest] = stack.own(stack.sample([1]))
    [_, newest] = stack.own(stack.sample([3, 2]))
    stack.release(stack.own(stack.sample([4])))
    assert stack.depth(oldest) == 3
    stack.own(stack.sample([1]))
    assert stack.depth(newest) == 3
    assert stack.depth(oldest) == 1


def test_the_head_of_a_table_outlives_its_tail() -> None:
    stack = BlockStack(8, (1, 2, 4, 8), 100)
    blocks = stack.own(stack.sample([1, 2, 3]))
    stack.release(blocks)
    assert [stack.depth(block) for block in blocks] == [1, 2, 3]


def test_a_sampled_block_stands_for_others() -> None:
    stack = BlockStack(8, (100,), 100)
    stack.level = 2
    blocks = stack.own(stack.sample([1, 2, 3]))
    stack.release(blocks)
    assert stack.depth(blocks[2]) == 1 + 2 * 4
    stack.look_up(stack.sample([1, 2, 3]), 25, reads_cache=True)
    assert stack.hit_tokens == [3 * 8 * 4, 0]


def test_what_the_sample_missed_counts_as_hits_of_every_pool() -> None:
    stack = BlockStack(8, (10, 20), 100)
    stack.level = 1
    outside, inside = KEY_SPACE - 1, 1
    stack.release(stack.own(stack.sample([outside, inside])))
    stack.look_up(stack.sample([outside, outside - 1, outside - 2, inside]), 33, reads_cache=True)
    assert stack.hit_rates(100) == [0.32, 0.32, 0.32]


def test_without_lookups_there_is_no_rate_and_nothing_divides_by_zero() -> None:
    sketch = ReuseSketch(16, 4)
    assert (sketch.curve(), sketch.hit_rate(), sketch.ideal_hit_rate()) == ((), None, None)
    admit(sketch, "a", [1], now=0)
    assert {point.hit_rate for point in sketch.curve()} == {0.0}
    assert (sketch.hit_rate(), sketch.ideal_hit_rate()) == (0.0, 0.0)


def test_the_last_prompt_token_is_never_a_hit() -> None:
    sketch = ReuseSketch(8, 64)
    for name in ("a", "b"):
        admit(sketch, name, range(16), now=0)
        sketch.finish(name, 1, now=0)
    assert sketch.hit_rate() == 8 / 32


def test_pools_of_other_block_sizes_have_the_same_memory() -> None:
    sketch = ReuseSketch(16, 100)
    assert [sketch.num_blocks_of(factor, 16) for factor in POOL_FACTORS] == [25, 50, 100, 200, 400, 800]
    assert [sketch.num_blocks_of(1.0, size) for size in (8, 32, 64)] == [200, 50, 25]
    assert ReuseSketch(64, 2).num_blocks_of(0.25, 64) == 1


def test_a_request_that_wants_prompt_logprobs_hits_nothing_and_fills_blocks() -> None:
    sketch = ReuseSketch(8, 64)
    for reads_cache in (True, False, True):
        admit(sketch, "a", range(17), now=0, reads_cache=reads_cache)
        sketch.finish("a", 1, now=0)
    assert sketch.hit_rate() == 16 / 51


def test_later_choices_hold_blocks_and_are_no_lookups() -> None:
    sketch = ReuseSketch(8, 64)
    admit(sketch, "a", range(17), now=0)
    admit(sketch, "a#1", range(17), now=0, is_counted=False)
    assert (sketch.num_lookups, sketch.num_prompt_tokens) == (1, 17)


@pytest.mark.parametrize(("is_greedy", "num_blocks"), [(True, 2 + 2), (False, 2 + 2 + 2)])
def test_greedy_requests_answer_a_prompt_alike_and_others_each_in_its_own_way(is_greedy: bool, num_blocks: int) -> None:
    """Two blocks of eight of the prompt, and two of each answer that differs."""
    sketch = ReuseSketch(8, 64)
    for name in ("a", "b"):
        admit(sketch, name, range(16), now=0, is_greedy=is_greedy)
        sketch.finish(name, 17, now=0)
    assert sketch.stacks[0].num_tracked == num_blocks


def test_memory_is_bounded() -> None:
    """A million blocks of eight tokens, none of which comes again."""
    sketch = ReuseSketch(8, 1 << 20, max_tracked_blocks=2048)
    prompt = array("i", range(32_000))
    most = 0
    for number in range(250):
        prompt[0] = number
        admit(sketch, str(number), prompt, now=number)
        sketch.finish(str(number), 1, now=number)
        most = max(most, sum(stack.num_tracked for stack in sketch.stacks))
    assert most <= 4 * 2048
    assert min(stack.num_tracked for stack in sketch.stacks) > 512
    assert [stack.num_tracked << stack.level for stack in sketch.stacks] == pytest.approx([1e6, 5e5, 2.5e5, 1.25e5], rel=0.1)
    assert sketch.ideal_hit_rate() == pytest.approx(0.0, abs=0.04)


def test_blocks_that_no_pool_reaches_go_before_the_sample_is_thinned() -> None:
    sketch = ReuseSketch(8, 16, max_tracked_blocks=1024)
    for number in range(100):
        admit(sketch, str(number), range(1000 * number, 1000 * number + 160), now=number)
        sketch.finish(str(number), 1, now=number)
    assert [stack.level for stack in sketch.stacks] == [0, 0, 0, 0]
    assert max(stack.num_tracked for stack in sketch.stacks) <= 1024


def test_a_thin_sample_tells_nearly_the_same_curve() -> None:
    exact, sampled = ReuseSketch(16, 512, max_tracked_blocks=100_000), ReuseSketch(16, 512, max_tracked_blocks=1500)
    rng = random.Random(3)
    documents = [rng.choices(range(50_000), k=rng.randint(100, 500)) for _ in range(300)]
    for number in range(600):
        prompt = documents[0] + rng.choice(documents) + rng.choices(range(50_000), k=40)
        for sketch in (exact, sampled):
            admit(sketch, str(number), prompt, now=number)
            sketch.finish(str(number), 20, now=number)
    assert [stack.level for stack in exact.stacks] == [0, 0, 0, 0]
    assert min(stack.level for stack in sampled.stacks[:3]) >= 1
    differences = [abs(one.hit_rate - other.hit_rate) for one, other in zip(exact.curve(), sampled.curve(), strict=True)]
    assert max(differences) < 0.03


def test_requests_whose_end_was_not_seen_give_their_blocks_back() -> None:
    sketch = ReuseSketch(8, 4)
    admit(sketch, "a", range(17), now=0)
    sketch.forget_running(now=1)
    sketch.finish("a", 5, now=2)
    admit(sketch, "b", range(17), now=3)
    assert sketch.hit_rate() == 16 / 34
