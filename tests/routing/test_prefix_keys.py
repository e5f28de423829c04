"""Keys of prompts: those of the blocks that the engine's own prefix cache could find."""

from __future__ import annotations

from typing import Any

from pagedcore import SamplingParams
from pagedcore.messages import AddRequest
from pagedcore.routing.known_prefixes import KnownPrefixes
from pagedcore.routing.prefix_keys import MAX_PREFIX_KEYS, PrefixKey, prefix_keys


def make_request(num_tokens: int, **options: Any) -> AddRequest:
    facts = {"request_id": "r", "group_id": "r", "params": SamplingParams(), "arrival_s": 0.0, **options}
    return AddRequest(**{"prompt_token_ids": list(range(num_tokens)), **facts})


def key_list(*numbers: int) -> list[PrefixKey]:
    return [PrefixKey(number) for number in numbers]


def test_only_full_blocks_before_the_last_token_have_a_key() -> None:
    assert [len(prefix_keys(make_request(n), 8)) for n in (0, 1, 8, 9, 16, 17)] == [0, 0, 0, 1, 1, 2]


def test_a_key_stands_for_all_tokens_before_it_and_for_who_may_share_them() -> None:
    first = prefix_keys(make_request(33), 8)
    other_end = prefix_keys(make_request(33, prompt_token_ids=[*range(16), *range(100, 117)]), 8)
    assert first[:2] == other_end[:2]
    assert not set(first[2:]) & set(other_end)
    other_start = prefix_keys(make_request(33, prompt_token_ids=[7, *range(1, 33)]), 8)
    salted, of_tenant = prefix_keys(make_request(33, cache_salt="s"), 8), prefix_keys(make_request(33, tenant="s"), 8)
    assert len({*first, *other_start, *salted, *of_tenant}) == 16


def test_of_a_long_prompt_the_beginning_is_enough() -> None:
    keys = prefix_keys(make_request(8 * MAX_PREFIX_KEYS + 80), 8)
    assert keys == prefix_keys(make_request(8 * MAX_PREFIX_KEYS + 1), 8)
    assert len(keys) == MAX_PREFIX_KEYS


def test_a_known_prefix_is_counted_up_to_its_first_gap() -> None:
    known = KnownPrefixes(10)
    known.add(key_list(1, 2, 3))
    assert [known.count_leading(key_list(*keys)) for keys in ((1, 2, 3, 4), (1, 9, 3), (9, 2), ())] == [3, 1, 0, 0]


def test_no_more_blocks_are_known_than_the_pool_has_and_the_oldest_leaf_goes_first() -> None:
    known = KnownPrefixes(4)
    known.add(key_list(1, 2, 3))
    known.add(key_list(7, 8))
    assert len(known) == 4
    assert known.count_leading(key_list(1, 2, 3)) == 2
    assert known.count_leading(key_list(7, 8)) == 2
    known.add(key_list(1))
    known.add(key_list(9))
    known.add(key_list(10))
    assert [known.count_leading(key_list(*keys)) for keys in ((1, 2), (7, 8), (9,), (10,))] == [1, 1, 1, 1], "7 and 8 are older than 1"


def test_of_a_prompt_larger_than_the_pool_its_beginning_is_known() -> None:
    known = KnownPrefixes(3)
    known.add(key_list(1, 2, 3, 4, 5))
    assert known.count_leading(key_list(1, 2, 3, 4, 5)) == 3


def test_what_is_known_is_bounded_whatever_the_pool() -> None:
    known = KnownPrefixes(10**9)
    for start in range(0, 80_000, 1000):
        known.add(key_list(*range(start, start + 1000)))
    assert len(known) == 65_536
