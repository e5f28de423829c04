"""The memories of hashes are bounded, and say what they promise up to their bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagedcore.observe.ghosts import BlockHistory, RecentBlocks
from support.observed import block_hash, missed


def test_the_latest_capacity_hashes_are_always_remembered() -> None:
    recent = RecentBlocks(capacity=10)
    for i in range(1000):
        recent.remember([block_hash(str(i))], [float(i)])
        latest = range(max(0, i - 9), i + 1)
        assert [recent.time_of(block_hash(str(k))) for k in latest] == [float(k) for k in latest]


def test_never_more_than_twice_the_capacity_is_remembered() -> None:
    recent = RecentBlocks(capacity=10)
    for i in range(1000):
        recent.remember([block_hash(str(i))], [float(i)])
        assert len(recent) <= 20
    assert recent.time_of(block_hash("0")) is None


def test_a_hash_evicted_again_has_its_latest_time() -> None:
    history = BlockHistory(num_blocks=1)
    history.evicted([block_hash("a")], [1.0])
    history.evicted([block_hash("a"), block_hash("b")], [5.0, 6.0])
    assert history.evicted_at(block_hash("a")) == 5.0


def test_an_unbounded_cache_serves_what_was_ever_evicted_up_to_the_first_new_block() -> None:
    history = BlockHistory(num_blocks=4)
    assert history.num_ideal_blocks(missed("a", "b")) == 0
    assert history.num_ideal_blocks(missed("a", "b")) == 0  # to ask is not to compute
    history.evicted([block_hash("a"), block_hash("b")], [0.0, 0.0])
    assert history.num_ideal_blocks(missed("a", "b", "c")) == 2
    assert history.num_ideal_blocks(missed("x", "a")) == 0


def test_an_unbounded_cache_serves_what_is_resident_or_being_computed() -> None:
    assert BlockHistory(num_blocks=4).num_ideal_blocks(missed("a?", "b!", "c")) == 2


@given(st.lists(st.lists(st.sampled_from("abcdefghij"), max_size=9), max_size=12), st.integers(1, 5))
def test_remembering_many_at_once_is_remembering_each(batches: list[list[str]], capacity: int) -> None:
    in_bulk, one_by_one = RecentBlocks(capacity), RecentBlocks(capacity)
    for now, batch in enumerate(batches):
        in_bulk.remember([block_hash(name) for name in batch], [float(now)] * len(batch))
        for name in batch:
            one_by_one.remember([block_hash(name)], [float(now)])
    assert [in_bulk.time_of(block_hash(name)) for name in "abcdefghij"] == [one_by_one.time_of(block_hash(name)) for name in "abcdefghij"]
