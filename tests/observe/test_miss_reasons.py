"""Each missed block has exactly one reason, the first that applies."""

from __future__ import annotations

import dataclasses
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pagedcore.observe.catalogue import MISS_REASONS
from pagedcore.observe.ghosts import BlockHistory
from pagedcore.observe.misses import Misses, explain_misses
from support.observed import BLOCK_SIZE, block_hash, disabled_lookup, make_lookup


def explain(*blocks: str, evicted: dict[str, float] | None = None, now_s: float = 100.0, **lookup: int | None) -> Misses:
    history = BlockHistory(num_blocks=64)
    for name, time_s in (evicted or {}).items():
        history.evicted([block_hash(name)], [time_s])
    return explain_misses(make_lookup(*blocks, **lookup), history, now_s)  # type: ignore[arg-type]


def test_a_request_that_may_not_read_the_cache_misses_every_block_as_disabled() -> None:
    misses = explain_misses(disabled_lookup(3), BlockHistory(num_blocks=64), 0.0)
    assert misses == Misses(("disabled",) * 3)


def test_a_fully_served_prefix_misses_nothing() -> None:
    assert explain(live=1, pool=2) == Misses()


def test_a_resident_block_behind_a_missing_one_is_a_hole() -> None:
    assert explain("a", "b!", "c!").reasons == ("cold", "hole", "hole")


def test_a_block_that_another_request_computes_is_in_flight() -> None:
    assert explain("a?", "b?", "c").reasons == ("in_flight", "in_flight", "cold")


def test_an_evicted_block_has_the_age_of_its_eviction() -> None:
    misses = explain("a", "b", evicted={"a": 97.5, "b": 10.0})
    assert misses.reasons == ("evicted", "evicted")
    assert misses.evicted_age_s == 2.5
    assert misses.num_ghost_hits == 2


def test_only_the_first_missing_block_gives_the_age() -> None:
    misses = explain("a", "b", evicted={"b": 10.0})
    assert misses.reasons == ("cold", "evicted")
    assert misses.evicted_age_s is None


def test_a_hole_comes_before_an_older_eviction_of_the_same_hash() -> None:
    misses = explain("a", "b!", evicted={"b": 10.0})
    assert misses.reasons == ("cold", "hole")
    assert misses.num_ghost_hits == 0


def test_in_flight_comes_before_evicted_and_is_a_ghost_hit_all_the_same() -> None:
    misses = explain("a?", evicted={"a": 10.0})
    assert misses.reasons == ("in_flight",)
    assert misses.num_ghost_hits == 1


def test_a_resident_block_that_is_computed_again_is_a_hole() -> None:
    history = BlockHistory(num_blocks=64)
    lookup = dataclasses.replace(make_lookup("a", "b"), missed=((block_hash("a"), False, True), (block_hash("b"), True, True)))
    assert explain_misses(lookup, history, 0.0).reasons == ("in_flight", "hole")


def test_evicted_comes_before_a_sibling() -> None:
    misses = explain("a", evicted={"a": 10.0}, sibling=2)
    assert misses.reasons == ("evicted",)
    assert misses.diverged_at_token is None


def test_sharing_less_than_the_first_block_is_short() -> None:
    misses = explain("a", "b", sibling=2)
    assert misses.reasons == ("short", "cold")
    assert misses.diverged_at_token == 2


def test_sharing_nothing_is_cold_even_beside_other_prompts() -> None:
    assert explain("a", sibling=0) == Misses(("cold",))


def test_leaving_a_cached_prompt_inside_a_block_is_diverged_at_that_token() -> None:
    misses = explain("b", "c", pool=1, sibling=2)
    assert misses.reasons == ("diverged", "cold")
    assert misses.diverged_at_token == 1 * BLOCK_SIZE + 2


def test_leaving_a_cached_prompt_at_a_block_border_is_diverged_there() -> None:
    misses = explain("c", live=1, pool=1, sibling=0)
    assert misses.reasons == ("diverged",)
    assert misses.diverged_at_token == 2 * BLOCK_SIZE


def test_going_on_where_no_cached_prompt_did_is_cold() -> None:
    assert explain("c", live=2) == Misses(("cold",))


@given(
    blocks=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(["", "!", "?"])), max_size=8, unique_by=lambda b: b[0]),
    evicted=st.sets(st.sampled_from("abcdefgh")),
    live=st.integers(0, 3),
    sibling=st.none() | st.integers(0, BLOCK_SIZE - 1),
)
def test_every_missed_block_has_one_known_reason(blocks: list[tuple[str, str]], evicted: set[str], live: int, sibling: int | None) -> None:
    names = [name + mark for name, mark in blocks]
    misses = explain(*names, evicted=dict.fromkeys(evicted, 1.0), live=live, sibling=sibling)
    assert len(misses.reasons) == len(names)
    assert set(misses.reasons) <= set(MISS_REASONS) - {"disabled"}
    assert misses.reasons.count("hole") == sum(mark == "!" for _, mark in blocks)
    assert misses.by_reason() == dict(Counter(misses.reasons))
    assert not {"short", "diverged"} & set(misses.reasons[1:])
    assert (misses.diverged_at_token is not None) == (bool(misses.reasons) and misses.reasons[0] in {"short", "diverged"})
