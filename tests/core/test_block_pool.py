"""The pool of blocks: exact ids, exact orders."""

from __future__ import annotations

import random
from collections import OrderedDict, deque

import pytest

from pagedcore.core.block_pool import BlockContent, BlockPool
from pagedcore.core.events import BlockEvicted
from pagedcore.core.lookup import BlockHash

ROOT = b"root"


def make_pool(num_blocks: int = 4) -> tuple[BlockPool, list[BlockEvicted]]:
    evicted: list[BlockEvicted] = []
    return BlockPool(num_blocks, lambda _, event: evicted.append(event)), evicted


def make_content(name: str, *, parent: bytes = ROOT, tokens: tuple[int, ...] | None = None, writer: str = "w") -> BlockContent:
    return BlockContent(BlockHash(name.encode()), parent, (hash(name),) if tokens is None else tokens, writer)


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_active_blocks, pool.num_cached_blocks, pool.num_free_blocks


def test_blocks_are_active_cached_or_free_and_sum_to_the_pool() -> None:
    pool, _ = make_pool()
    assert counts(pool) == (0, 0, 4)
    assert pool.allocate(3, 0.0) == [0, 1, 2]
    pool.publish(0, make_content("a"), 0.0)
    assert counts(pool) == (3, 0, 1)
    pool.release([0, 1, 2], 1.0)
    assert counts(pool) == (0, 1, 3)
    pool.check_invariants()


def test_never_hashed_blocks_are_used_before_a_cached_one_is_evicted() -> None:
    pool, evicted = make_pool(3)
    pool.allocate(2, 0.0)
    pool.publish(0, make_content("a"), 0.0)
    pool.release([0, 1], 0.0)
    assert pool.allocate(2, 1.0) == [2, 1]
    assert evicted == []
    assert pool.allocate(1, 2.0) == [0]
    assert [event.block_hash for event in evicted] == [b"a"]
    assert pool.find(BlockHash(b"a")) is None


def test_the_tail_of_a_table_is_evicted_before_its_head() -> None:
    pool, evicted = make_pool(3)
    table = pool.allocate(3, 0.0)
    for block_id, name in zip(table, "abc", strict=True):
        pool.publish(block_id, make_content(name), 0.0)
    pool.release(table, 1.0)
    assert pool.cached_order() == [2, 1, 0]
    assert pool.allocate(3, 2.0) == [2, 1, 0]
    assert [event.block_hash for event in evicted] == [b"c", b"b", b"a"]


def test_a_block_with_an_owner_is_never_evicted() -> None:
    pool, _ = make_pool(2)
    pool.allocate(2, 0.0)
    pool.publish(0, make_content("a"), 0.0)
    pool.acquire([0])
    pool.release([0, 1], 1.0)
    assert pool.num_available_blocks == 1
    assert pool.allocate(1, 2.0) == [1]
    with pytest.raises(AssertionError, match="1 blocks asked, 0 available"):
        pool.allocate(1, 2.0)


def test_an_acquired_block_leaves_the_lru_order_and_returns_as_the_newest() -> None:
    pool, _ = make_pool(3)
    for name in "abc":
        (block_id,) = pool.allocate(1, 0.0)
        pool.publish(block_id, make_content(name), 0.0)
    for block_id in (0, 1, 2):
        pool.release([block_id], 1.0)
    pool.acquire([0])
    assert pool.cached_order() == [1, 2]
    pool.release([0], 2.0)
    assert pool.cached_order() == [1, 2, 0]


def test_of_two_blocks_with_the_same_content_only_the_first_is_hashed() -> None:
    pool, _ = make_pool()
    pool.allocate(2, 0.0)
    assert pool.publish(0, make_content("a"), 0.0)
    assert not pool.publish(1, make_content("a"), 0.0)
    pool.release([1], 1.0)
    pool.release([0], 1.0)
    assert counts(pool) == (0, 1, 3)
    assert pool.find(BlockHash(b"a")) == 0


def test_eviction_tells_reuses_by_others_lifetime_and_idle_time() -> None:
    pool, evicted = make_pool(1)
    pool.allocate(1, 1.0)
    pool.publish(0, make_content("a", writer="w"), 2.0)
    pool.release([0], 3.0)
    pool.acquire([0])
    assert pool.note_use([0], "w", 5.0) == []
    assert pool.note_use([0], "other", 9.0) == [4.0]
    pool.release([0], 10.0)
    pool.allocate(1, 14.0)
    assert evicted == [BlockEvicted(BlockHash(b"a"), 14.0, num_reuses=1, lifetime_s=12.0, idle_s=4.0)]


def test_unpublished_blocks_stay_with_their_owner_and_then_are_free() -> None:
    pool, evicted = make_pool(2)
    pool.allocate(2, 0.0)
    for block_id, name in enumerate("ab"):
        pool.publish(block_id, make_content(name), 0.0)
    pool.release([1], 0.0)
    assert pool.unpublish(pool.cached_order()) == [b"b"]
    assert counts(pool) == (1, 0, 1)
    assert pool.has_hashed_blocks()
    assert pool.unpublish([0, 0, 1]) == [b"a"]
    pool.release([0], 0.0)
    assert (counts(pool), pool.has_hashed_blocks(), evicted) == ((0, 0, 2), False, [])
    pool.check_invariants()


def test_sibling_prefix_is_the_longest_among_resident_children_of_the_same_parent() -> None:
    pool, _ = make_pool(4)
    pool.allocate(4, 0.0)
    for block_id, tokens in enumerate([(1, 2, 3, 4), (1, 2, 9, 9), (5, 5, 5, 5)]):
        pool.publish(block_id, make_content(f"b{block_id}", tokens=tokens), 0.0)
    pool.publish(3, make_content("c", parent=b"elsewhere", tokens=(7, 7, 7, 7)), 0.0)
    assert pool.sibling_common_tokens(ROOT, [1, 2, 3, 9]) == 3
    assert pool.sibling_common_tokens(ROOT, [5, 5, 0, 0]) == 2
    assert pool.sibling_common_tokens(ROOT, [7, 7, 7, 7]) == 0
    assert pool.sibling_common_tokens(b"nobody", [1, 2, 3, 4]) is None
    pool.unpublish([0])
    assert pool.sibling_common_tokens(ROOT, [1, 2, 3, 9]) == 2


@pytest.mark.parametrize("seed", range(10))
def test_lru_order_equals_an_ordered_dict(seed: int) -> None:
    """Random life of single-block tables against the plainest model: a FIFO of free ids and an OrderedDict of cached ones."""
    rng = random.Random(seed)
    pool, evicted = make_pool(8)
    free, cached, owned = deque(range(8)), OrderedDict[int, str](), list[tuple[int, str | None]]()
    expected_evictions: list[bytes] = []
    for step in range(400):
        action = rng.choice(("allocate", "release", "revive"))
        if action == "allocate" and (free or cached):
            if free:
                block_id = free.popleft()
            else:
                block_id, name = cached.popitem(last=False)
                expected_evictions.append(name.encode())
            assert pool.allocate(1, float(step)) == [block_id]
            new_name = f"n{step}" if rng.random() < 0.7 else None
            if new_name is not None:
                assert pool.publish(block_id, make_content(new_name), float(step))
            owned.append((block_id, new_name))
        elif action == "release" and owned:
            block_id, owned_name = owned.pop(rng.randrange(len(owned)))
            pool.release([block_id], float(step))
            if owned_name is None:
                free.append(block_id)
            elif all(other != block_id for other, _ in owned):
                cached[block_id] = owned_name
        elif action == "revive" and cached:
            block_id = rng.choice(list(cached))
            owned.append((block_id, cached.pop(block_id)))
            pool.acquire([block_id])
        assert pool.cached_order() == list(cached)
        pool.check_invariants()
    assert [event.block_hash for event in evicted] == expected_evictions
    assert expected_evictions
