"""The blocks of host memory: exact blocks, exact orders, exact copies."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.host_tier.host_tier import Copies, HostTier
from pagedcore.host_tier.swapped import Swapped

A, B, C, D = b"a", b"b", b"c", b"d"


def make_tier(num_blocks: int, *names: bytes) -> HostTier:
    """A tier that holds these blocks, the first one the oldest, with no copy left to make."""
    tier = HostTier(num_blocks)
    for number, name in enumerate(names):
        tier.put(name, number)
    tier.take_copies(0.0)
    return tier


def read(tier: HostTier, *names: bytes) -> Copies:
    """Plan to copy these blocks back to blocks 90, 91, ..."""
    tier.copy_back(range(90, 90 + len(names)), tier.hold(names))
    return tier.take_copies(0.0)


def test_what_the_device_gives_up_is_copied_to_a_host_block_of_its_own() -> None:
    tier = HostTier(3)
    tier.put(A, 7)
    tier.put(B, 4)
    assert tier.take_copies(0.0) == Copies(out=((7, 0), (4, 1)))
    assert tier.take_copies(0.0) == Copies()
    assert tier.order() == [A, B]


def test_a_full_tier_gives_up_its_oldest_block() -> None:
    tier = make_tier(2, A, B)
    tier.put(C, 9)
    assert tier.take_copies(0.0).out == ((9, 0),)
    assert (tier.order(), tier.num_leading([A]), tier.num_leading([C])) == ([B, C], 0, 1)


def test_of_two_blocks_for_one_host_block_in_one_plan_only_the_last_is_copied() -> None:
    tier = HostTier(1)
    tier.put(A, 7)
    tier.put(B, 4)
    assert tier.take_copies(0.0).out == ((4, 0),)
    assert (tier.num_leading([A]), tier.num_leading([B])) == (0, 1)


def test_what_is_there_already_is_not_copied_again_and_becomes_the_newest() -> None:
    tier = make_tier(2, A, B)
    tier.put(A, 9)
    assert tier.take_copies(0.0) == Copies()
    assert tier.order() == [B, A]


def test_the_leading_blocks_end_at_the_first_that_is_missing_and_no_hash_behind_it_is_asked_for() -> None:
    tier = make_tier(4, A, B, D)
    hashes = iter([A, B, C, D])
    assert tier.num_leading(hashes) == 2
    assert list(hashes) == [D]


def test_a_host_block_that_is_read_is_not_filled_anew_before_its_step_is_done() -> None:
    tier = make_tier(2, A, B)
    copies = read(tier, A)
    assert copies.back == ((90, 0),)
    tier.put(C, 5)  # takes B's host block, though A is older
    tier.put(D, 6)  # and that one again
    assert tier.take_copies(0.0).out == ((6, 1),)
    tier.end_reads(copies.back)
    tier.put(C, 5)
    assert tier.take_copies(0.0).out == ((5, 0),)


def test_nothing_is_kept_when_every_host_block_is_read() -> None:
    tier = make_tier(1, A)
    copies = read(tier, A)
    tier.put(B, 5)
    assert (tier.take_copies(0.0), tier.num_leading([B])) == (Copies(), 0)
    tier.end_reads(copies.back)
    assert tier.order() == [A]


def test_what_the_device_has_back_goes_first_its_tail_foremost() -> None:
    tier = make_tier(4, C, B, A, D)  # a prefix A, B, C, evicted from its tail
    tier.end_reads(read(tier, A, B, C).back)
    assert tier.order() == [C, B, A, D]


def test_two_readers_of_a_host_block_are_waited_for() -> None:
    tier = make_tier(1, A)
    first, second = read(tier, A), read(tier, A)
    tier.end_reads(first.back)
    assert tier.order() == []
    tier.end_reads(second.back)
    assert tier.order() == [A]


def test_clear_forgets_everything_and_gets_host_blocks_that_are_read_back_later() -> None:
    tier = make_tier(3, A, B)
    tier.put(C, 5)
    copies = read(tier, A)
    tier.clear()
    assert tier.num_leading([A]) == tier.num_leading([B]) == tier.num_leading([C]) == 0
    for name in (A, B, C):
        tier.put(name, 6)
    assert {host_block for _, host_block in tier.take_copies(0.0).out} == {1, 2}
    tier.end_reads(copies.back)
    tier.check_invariants([])
    tier.put(D, 6)
    assert tier.take_copies(0.0).out == ((6, 0),)


def test_a_tier_without_blocks_keeps_nothing() -> None:
    tier = HostTier(0)
    tier.put(A, 1)
    tier.watch("r", [A])
    assert (tier.take_copies(0.0), tier.num_leading([A]), tier.num_swapped_requests) == (Copies(), 0, 0)
    tier.check_invariants([])


def test_it_says_whose_blocks_were_copied_out_while_their_request_waits() -> None:
    tier = HostTier(4)
    tier.watch("first", [A, B])
    tier.watch("second", [A, C])
    for number, name in enumerate((A, B, D)):
        tier.put(name, number)
    assert tier.num_swapped_requests == 0
    assert tier.take_copies(3.0).swapped_out == (Swapped("first", 3.0, "out", 2), Swapped("second", 3.0, "out", 1))
    assert tier.num_swapped_requests == 2
    tier.unwatch("first")
    tier.unwatch("unknown")
    tier.put(C, 5)
    assert tier.take_copies(4.0).swapped_out == (Swapped("second", 4.0, "out", 1),)
    assert tier.num_swapped_requests == 1


def test_a_copy_that_another_one_of_the_plan_replaces_is_nobodys() -> None:
    tier = HostTier(1)
    tier.watch("r", [A])
    tier.put(A, 0)
    tier.put(B, 1)
    assert tier.take_copies(0.0).swapped_out == ()


@pytest.mark.parametrize("broken", ["_free", "_hashes", "_order"])
def test_the_tier_finds_its_own_contradictions(broken: str) -> None:
    tier = make_tier(3, A, B)
    tier.check_invariants([])
    part = getattr(tier, broken)
    del part[next(iter(part)) if broken != "_free" else 0]
    with pytest.raises(AssertionError):
        tier.check_invariants([])


steps = st.lists(st.tuples(st.sampled_from(["put", "put", "read", "plan", "done", "clear"]), st.integers(0, 7)), max_size=60)


@given(st.integers(1, 5), steps)
def test_a_block_that_is_copied_back_is_the_one_that_was_asked_for(num_blocks: int, actions: list[tuple[str, int]]) -> None:
    """Random lives of a tier beside a memory on which the copies of each plan are made, as late as the device may make them."""
    tier, memory, in_flight = HostTier(num_blocks), dict[int, bytes](), deque[Copies]()
    asked: list[bytes] = []
    for action, number in actions:
        name = bytes([number])
        if action == "put":
            tier.put(name, number)
        elif action == "read" and tier.num_leading([name]):
            tier.copy_back([number], tier.hold([name]))
            asked.append(name)
        elif action == "plan":
            copies = tier.take_copies(0.0)
            memory.update({host_block: bytes([block_id]) for block_id, host_block in copies.out})
            assert [memory[host_block] for _, host_block in copies.back] == asked
            asked = []
            in_flight.append(copies)
        elif action == "done" and in_flight:
            tier.end_reads(in_flight.popleft().back)
        elif action == "clear" and not asked:
            tier.clear()
        tier.check_invariants(copy for copies in in_flight for copy in copies.back)
