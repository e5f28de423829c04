"""Which cached block goes first: the oldest of all, or the oldest of a tenant that holds more than its share."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionOrder(Protocol[K]):
    """Blocks that nobody uses now and that can be given up, the least recently used first, and whose every other block is."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[K]: ...
    def __contains__(self, block: object, /) -> bool: ...
    def __setitem__(self, block: K, value: None, /) -> None: ...
    def __delitem__(self, block: K, /) -> None: ...
    def move_to_end(self, block: K, last: bool = True) -> None: ...
    def note_taken(self, blocks: Iterable[K], tenant: str) -> None: ...
    def note_freed(self, block: K) -> None: ...
    def num_obtainable(self, tenant: str, num_free: int) -> int: ...
    def is_used_up(self, tenant: str) -> bool: ...
    def pop_first(self, tenant: str) -> tuple[K, str]: ...
    def clear(self) -> None: ...


class LruOrder(OrderedDict[K, None]):
    """Tenants have no shares: the least recently used block of all goes first, and nobody asks whose it is."""

    def note_taken(self, blocks: Iterable[K], tenant: str) -> None:
        """Nothing to note."""

    def note_freed(self, block: K) -> None:
        """Nothing to note."""

    def num_obtainable(self, tenant: str, num_free: int) -> int:
        """Free blocks, and all that can be given up."""
        return num_free + len(self)

    def is_used_up(self, tenant: str) -> bool:
        """Never."""
        return False

    def pop_first(self, tenant: str) -> tuple[K, str]:
        """Give up the least recently used block."""
        return self.popitem(last=False)[0], ""


class _Holdings(Generic[K]):
    """What one tenant has: blocks in all, and those of them that can be given up, the oldest first."""

    __slots__ = ("num_blocks", "unused")

    def __init__(self) -> None:
        self.num_blocks = 0
        self.unused: OrderedDict[K, int] = OrderedDict()
        """Block -> its age: the smaller, the longer unused."""


class ShareOrder(Generic[K]):
    """Owns whose each block is, and the order in which unused ones are given up, where each tenant has a share.

    A tenant's blocks are those that it was given last and that were not freed or given up since: in use, or unused with its content.
    Contents are never shared between tenants, so each block is one tenant's. A tenant is over its share while it has more blocks
    than that; the one that asks for a block counts as if it had it already. Then:

    1. the oldest unused block of a tenant over its share goes first, whoever's it is of those tenants;
    2. without such a block, the oldest unused block of all goes, but only to a tenant that is within its share with it.

    So a tenant over its share never costs another one a block that is within that one's share: without free blocks, and blocks of
    tenants over their shares, it gets none. Where nobody is over a share, the order is that of `LruOrder`.
    """

    def __init__(self, share_blocks: int) -> None:
        self._share = share_blocks
        self._unused: OrderedDict[K, str] = OrderedDict()
        """Unused block -> tenant, the oldest first."""
        self._owners: dict[K, str] = {}
        self._holdings: dict[str, _Holdings[K]] = {}
        self._over: dict[str, None] = {}
        """Tenants over their share, fewer than 1 / fraction of them."""
        self._newest_age = self._oldest_age = 0

    def __len__(self) -> int:
        return len(self._unused)

    def __iter__(self) -> Iterator[K]:
        return iter(self._unused)

    def __contains__(self, block: object, /) -> bool:
        return block in self._unused

    def __setitem__(self, block: K, value: None, /) -> None:
        """Nobody uses the block from now on: it becomes the newest."""
        tenant = self._owners[block]
        self._newest_age += 1
        self._unused[block] = tenant
        self._holdings[tenant].unused[block] = self._newest_age

    def __delitem__(self, block: K, /) -> None:
        """The block is in use again."""
        del self._holdings[self._unused.pop(block)].unused[block]

    def move_to_end(self, block: K, last: bool = True) -> None:
        """Make an unused block the newest, or the oldest."""
        unused = self._holdings[self._owners[block]].unused
        self._newest_age += last
        self._oldest_age -= not last
        unused[block] = self._newest_age if last else self._oldest_age
        unused.move_to_end(block, last)
        self._unused.move_to_end(block, last)

    def note_taken(self, blocks: Iterable[K], tenant: str) -> None:
        """A tenant was given these blocks, which were free."""
        for block in blocks:
            self._owners[block] = tenant
            holdings = self._holdings.setdefault(tenant, _Holdings())
            holdings.num_blocks += 1
            if holdings.num_blocks == self._share + 1:
                self._over[tenant] = None

    def note_freed(self, block: K) -> None:
        """A block that is in use is nobody's from now on."""
        tenant = self._owners.pop(block)
        holdings = self._holdings[tenant]
        holdings.num_blocks -= 1
        if holdings.num_blocks == 0:
            del self._holdings[tenant]
        if holdings.num_blocks == self._share:
            del self._over[tenant]

    def num_obtainable(self, tenant: str, num_free: int) -> int:
        """Blocks that the tenant could be given now, beside so many that are free, which it would be given first."""
        mine = self._holdings.get(tenant)
        num_mine, num_unused = (0, 0) if mine is None else (mine.num_blocks, len(mine.unused))
        num_first = num_free + sum(self._num_excess(other) for other in self._over if other != tenant)
        num_protected = len(self._unused) - num_unused - (num_first - num_free)
        return num_first + num_unused + min(num_protected, max(0, self._share - num_mine - num_first))

    def is_used_up(self, tenant: str) -> bool:
        """Whether one more block would take the tenant over its share."""
        mine = self._holdings.get(tenant)
        return mine is not None and mine.num_blocks >= self._share

    def pop_first(self, tenant: str) -> tuple[K, str]:
        """Give up the block that goes first to this tenant; returns it, which is free then, and whose it was.

        The caller has asked `num_obtainable`.
        """
        candidates = [*self._over, tenant] if self.is_used_up(tenant) else self._over
        heads = [next(iter(unused.items())) for name in candidates if (unused := self._holdings[name].unused)]
        assert heads or not self.is_used_up(tenant), f"the tenant {tenant!r} has used up its share, and no other one is over it"
        block = min(heads, key=lambda head: head[1])[0] if heads else next(iter(self._unused))
        loser = self._unused[block]
        del self[block]
        self.note_freed(block)
        return block, loser

    def clear(self) -> None:
        """Every block is free."""
        for part in (self._unused, self._owners, self._holdings, self._over):
            part.clear()

    def _num_excess(self, tenant: str) -> int:
        """Unused blocks of a tenant that it gives up before those within a share go."""
        holdings = self._holdings[tenant]
        return min(len(holdings.unused), holdings.num_blocks - self._share)

    def check_invariants(self) -> None:
        """Raises AssertionError when the book contradicts itself."""
        counts = Counter(self._owners.values())
        assert counts == Counter({name: held.num_blocks for name, held in self._holdings.items()}), (
            "blocks are counted for the wrong tenant"
        )
        assert self._over.keys() == {name for name, num_blocks in counts.items() if num_blocks > self._share}, "a tenant is over its share"
        by_age = sorted((age, block) for held in self._holdings.values() for block, age in held.unused.items())
        assert [block for _, block in by_age] == list(self._unused), "the tenants' orders disagree with that of all"


def make_order(share_blocks: int | None) -> EvictionOrder[K]:
    """The order for a share of so many blocks a tenant; None is no shares."""
    return LruOrder() if share_blocks is None else ShareOrder(share_blocks)
