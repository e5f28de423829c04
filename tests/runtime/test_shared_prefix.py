"""Which blocks of a step are read once for all rows, and when that pays."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.runtime import shared_prefix
from pagedcore.runtime.decode_graphs import graph_sizes
from pagedcore.runtime.shared_prefix import SharedPrefix, find_shared_prefix, min_saved_blocks, shared_graph_sizes

QWEN_7B_BLOCK = 16 * 2 * 4 * 128 * 2
"""Bytes of one layer's block of 16 tokens."""


def common_blocks(tables: Sequence[Sequence[int]], limits: Sequence[int]) -> int:
    """The naive loop."""
    count = 0
    while all(count < limit for limit in limits) and len({table[count] for table in tables}) == 1:
        count += 1
    return count


def most_saved(tables: Sequence[Sequence[int]], limits: Sequence[int]) -> int:
    """Over every prefix of every table: blocks that the rows which begin with it need not read again."""
    prefixes = {tuple(table[:count]) for table, limit in zip(tables, limits, strict=True) for count in range(1, limit + 1)}
    rows = list(zip(tables, limits, strict=True))
    counts = {prefix: sum(limit >= len(prefix) and tuple(table[: len(prefix)]) == prefix for table, limit in rows) for prefix in prefixes}
    return max(((count - 1) * len(prefix) for prefix, count in counts.items()), default=0)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Tables as a prefix cache makes them: a block that two of them hold stands behind the same blocks in both."""
    ids: dict[tuple[int, ...], int] = {}
    contents = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=9))
    stem = draw(st.lists(st.integers(0, 2), max_size=9))
    contents = [stem[: draw(st.integers(0, len(stem)))] + content for content in contents]
    tables = [[ids.setdefault(tuple(content[: end + 1]), len(ids)) for end in range(len(content))] for content in contents]
    return tables, [draw(st.integers(0, len(table))) for table in tables]


@given(steps())
def test_what_is_found_is_common_to_its_members_and_cannot_be_longer(step: tuple[list[list[int]], list[int]]) -> None:
    tables, limits = step
    found = find_shared_prefix(tables, limits, min_saved=1)
    best = most_saved(tables, limits)
    assert (found is None) == (best == 0)
    if found is not None:
        members = sorted(found.members)
        assert found.members == members
        assert found.num_blocks == common_blocks([tables[i] for i in members], [limits[i] for i in members])
        assert 2 * (len(members) - 1) * found.num_blocks >= best, "half of the best at least"


@given(steps(), st.integers(1, 60))
def test_nothing_is_found_that_saves_less_than_asked(step: tuple[list[list[int]], list[int]], min_saved: int) -> None:
    tables, limits = step
    found = find_shared_prefix(tables, limits, min_saved)
    whole = find_shared_prefix(tables, limits, 1)
    if found is None:
        assert whole is None or most_saved(tables, limits) < 2 * min_saved
    else:
        assert (len(found.members) - 1) * found.num_blocks >= min_saved


def test_blocks_that_are_twins_of_others_are_not_taken_for_them() -> None:
    """Two rows may compute the same tokens at once, into blocks of their own, and later share what follows."""
    assert find_shared_prefix([[1, 2, 9, 4], [1, 3, 9, 4]], [4, 4], 1) == SharedPrefix(1, [0, 1])
    assert find_shared_prefix([[1, 7, 9, 4], [2, 7, 9, 4]], [4, 4], 1) is None


def w3_tables(num_rows: int, num_shared: int, num_own: int) -> list[list[int]]:
    free = list(range(num_shared + num_rows * num_own))
    random.Random(0).shuffle(free)
    shared, own = free[:num_shared], free[num_shared:]
    return [shared + own[row * num_own : (row + 1) * num_own] for row in range(num_rows)]


def test_rows_that_begin_otherwise_are_left_out() -> None:
    tables = w3_tables(64, 125, 5)
    tables[0] = [*range(10_000, 10_130)]
    tables[5] = tables[5][:2] + tables[0][2:]
    found = find_shared_prefix(tables, [129] * 64, 1)
    assert found == SharedPrefix(125, [i for i in range(64) if i not in (0, 5)])


def test_a_block_that_is_not_full_for_every_member_does_not_count() -> None:
    tables = w3_tables(4, 20, 2)
    assert find_shared_prefix(tables, [21, 21, 17, 21], 1) == SharedPrefix(17, [0, 1, 2, 3])
    assert find_shared_prefix(tables, [21, 21, 3, 21], 1) == SharedPrefix(20, [0, 1, 3])


def test_the_larger_of_two_families_is_served() -> None:
    many, few = w3_tables(20, 3, 130), w3_tables(10, 128, 5)
    few = [[block + 100_000 for block in table] for table in few]
    assert find_shared_prefix(many + few, [132] * 30, 1) == SharedPrefix(128, list(range(20, 30)))


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"), [(8, [8]), (100, [32, 64, 100]), (256, [32, 64, 128, 256]), (600, [32, 64, 128, 256, 512, 600])]
)
def test_few_sizes_have_a_graph_with_a_shared_prefix(max_num_seqs: int, expected: list[int]) -> None:
    assert shared_graph_sizes(graph_sizes(max_num_seqs)) == expected


def pays(num_rows: int, prefix_tokens: int, num_padding_rows: int) -> bool:
    return (num_rows - 1) * (prefix_tokens // 16) >= min_saved_blocks(num_padding_rows, QWEN_7B_BLOCK)


@pytest.mark.parametrize(
    ("num_rows", "prefix_tokens", "num_padding_rows", "expected"),
    [
        (256, 2048, 0, True),
        (256, 144, 0, True),
        (256, 112, 0, False),
        (32, 2048, 0, True),
        (32, 512, 0, False),
        (160, 2048, 96, True),
        (129, 1024, 96, False),
        (2, 2048, 30, False),
        (20, 16384, 8, True),
    ],
)
def test_a_prefix_must_save_more_than_it_costs(num_rows: int, prefix_tokens: int, num_padding_rows: int, expected: bool) -> None:
    assert pays(num_rows, prefix_tokens, num_padding_rows) is expected


def test_wider_keys_pay_sooner() -> None:
    assert min_saved_blocks(0, shared_prefix.MIN_SAVED_BYTES) == 1
    assert min_saved_blocks(3, QWEN_7B_BLOCK) == 2048 + 3 * 128
    assert min_saved_blocks(0, QWEN_7B_BLOCK - 1) == 2049
