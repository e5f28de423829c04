"""Which cached block goes first where tenants have shares: exact orders, and a plain model of the rule."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.tenancy.eviction import LruOrder, ShareOrder, make_order

TENANTS = ("", "a", "b", "c")


def make_shares(share: int, cached: str) -> ShareOrder[int]:
    """An order that holds one unused block a letter, of the tenant of this letter; the first is the oldest."""
    order: ShareOrder[int] = ShareOrder(share)
    for block, tenant in enumerate(cached):
        order.note_taken([block], tenant)
        order[block] = None
    order.check_invariants()
    return order


def evictions(order: ShareOrder[int], tenant: str, num_blocks: int) -> list[tuple[int, str]]:
    """What goes when the tenant takes so many blocks, one after another."""
    gone = []
    for _ in range(num_blocks):
        block, loser = order.pop_first(tenant)
        order.note_taken([block], tenant)
        order.check_invariants()
        gone.append((block, loser))
    return gone


def test_a_tenant_over_its_share_gives_up_its_own_oldest_blocks_before_anybody_elses() -> None:
    assert evictions(make_shares(3, "bbaaaa"), "a", 3) == [(2, "a"), (3, "a"), (4, "a")]


def test_the_block_that_is_asked_for_counts_already() -> None:
    assert evictions(make_shares(2, "bbaa"), "a", 1) == [(2, "a")]


def test_a_tenant_within_its_share_takes_from_those_over_theirs_first_and_then_the_oldest_of_all() -> None:
    assert evictions(make_shares(3, "cbaaaaa"), "b", 2) == [(2, "a"), (3, "a")]  # b has three now
    assert evictions(make_shares(4, "cbaaaaa"), "b", 3) == [(2, "a"), (0, "c"), (1, "b")]


def test_of_several_tenants_over_their_shares_the_oldest_block_goes() -> None:
    assert evictions(make_shares(1, "cabab"), "d", 1) == [(1, "a")]
    assert evictions(make_shares(1, "cbaab"), "a", 2) == [(1, "b"), (2, "a")]


def test_a_tenant_that_has_used_up_its_share_gets_nothing_that_others_cache_within_theirs() -> None:
    order = make_shares(2, "bbaa")
    del order[2], order[3]
    assert order.is_used_up("a")
    assert (order.num_obtainable("a", 0), order.num_obtainable("a", 5), order.num_obtainable("c", 0)) == (0, 5, 2)
    with pytest.raises(AssertionError, match="used up its share"):
        order.pop_first("a")


def test_blocks_in_use_count_to_the_share_until_they_are_freed() -> None:
    order = make_shares(2, "ba")
    order.note_taken([7], "a")
    assert order.is_used_up("a")
    assert evictions(order, "a", 1) == [(1, "a")]
    order.note_freed(7)
    order.check_invariants()
    assert evictions(order, "a", 1) == [(0, "b")]


def test_moving_a_block_makes_it_the_newest_or_the_oldest() -> None:
    order = make_shares(9, "aba")
    order.move_to_end(0)
    assert list(order) == [1, 2, 0]
    order.move_to_end(2, last=False)
    assert list(order) == [2, 1, 0]
    order.check_invariants()
    order.clear()
    order.check_invariants()
    assert (len(order), order.num_obtainable("a", 0), order.is_used_up("a")) == (0, 0, False)


def test_without_shares_the_oldest_of_all_goes_to_whoever_asks() -> None:
    order = make_order(None)
    assert isinstance(order, LruOrder)
    order.note_taken([5, 3], "a")
    order[5] = order[3] = None
    assert (order.num_obtainable("b", 2), order.is_used_up("a")) == (4, False)
    assert [order.pop_first("b")[0], order.pop_first("a")[0]] == [5, 3]


@dataclass
class Model:
    """The rule, told without any index: who has which block, and the unused ones, the oldest first."""

    share: int
    owners: dict[int, str] = field(default_factory=dict)
    unused: list[int] = field(default_factory=list)

    def first(self, tenant: str) -> int | None:
        """The block that goes when the tenant asks for one."""
        has = Counter(self.owners.values())
        has[tenant] += 1
        over = [block for block in self.unused if has[self.owners[block]] > self.share]
        if over:
            return over[0]
        return self.unused[0] if self.unused and has[tenant] <= self.share else None

    def num_obtainable(self, tenant: str, free: list[int]) -> int:
        """Blocks that the tenant gets one after another until nothing goes."""
        trial, free = Model(self.share, dict(self.owners), list(self.unused)), list(free)
        num_blocks = 0
        while True:
            block = free.pop() if free else trial.first(tenant)
            if block is None:
                return num_blocks
            num_blocks += 1
            trial.owners[block] = tenant
            if block in trial.unused:
                trial.unused.remove(block)


@given(st.data(), st.integers(1, 9), st.integers(1, 12))
def test_the_order_is_that_of_the_plain_rule_whatever_happens(data: st.DataObject, share: int, num_blocks: int) -> None:
    order, model, free = ShareOrder[int](share), Model(share), list(range(num_blocks))
    for _ in range(data.draw(st.integers(0, 40))):
        tenant, act = data.draw(st.sampled_from(TENANTS)), data.draw(st.sampled_from(("take", "take", "leave", "leave", "use", "free")))
        in_use = sorted(model.owners.keys() - set(model.unused))
        if act == "take" and (free or model.first(tenant) is not None):
            _take(order, model, free, tenant)
        elif act == "leave" and in_use:
            block = data.draw(st.sampled_from(in_use))
            order[block] = None
            model.unused.append(block)
        elif act == "use" and model.unused:
            block = data.draw(st.sampled_from(model.unused))
            del order[block]
            model.unused.remove(block)
        elif act == "free" and in_use:
            block = data.draw(st.sampled_from(in_use))
            order.note_freed(block)
            del model.owners[block]
            free.append(block)
        order.check_invariants()
        assert list(order) == model.unused
        assert {t: order.num_obtainable(t, len(free)) for t in TENANTS} == {t: model.num_obtainable(t, free) for t in TENANTS}


def _take(order: ShareOrder[int], model: Model, free: list[int], tenant: str) -> None:
    """Free blocks go first; else the order's first, which costs nobody within a share anything while this tenant is over its own."""
    if free:
        block = free.pop()
    else:
        has = Counter(model.owners.values())
        block, loser = order.pop_first(tenant)
        assert (block, loser) == (model.first(tenant), model.owners[block])
        assert has[tenant] < model.share or loser == tenant or has[loser] > model.share
        model.unused.remove(block)
    order.note_taken([block], tenant)
    model.owners[block] = tenant


@given(st.lists(st.sampled_from(TENANTS), max_size=12), st.lists(st.sampled_from(TENANTS), max_size=12))
def test_while_nobody_is_over_a_share_the_order_is_that_of_all(cached: list[str], askers: list[str]) -> None:
    order = make_shares(100, "".join(name or "d" for name in cached))
    expected = list(range(len(cached)))[: len(askers)]
    assert [order.pop_first(tenant)[0] for tenant, _ in zip(askers, expected, strict=False)] == expected
