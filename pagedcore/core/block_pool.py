"""The blocks of KV memory: who holds them, what they contain, which one goes first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pagedcore.core.block_siblings import BlockSiblings
from pagedcore.core.events import BlockEvicted
from pagedcore.core.lookup import BlockHash
from pagedcore.tenancy.eviction import EvictionOrder, make_order


@dataclass(slots=True, eq=False)
class BlockContent:
    """What a full block holds, and by whom."""

    block_hash: BlockHash
    parent_key: bytes
    """The parent's hash; for a first block the domain."""
    token_ids: tuple[int, ...]
    writer: str
    """Group id of the request that computed it."""


@dataclass(slots=True, eq=False)
class Block:
    """One block's state; what comes after `content` describes it and means nothing without it."""

    ref_count: int = 0
    content: BlockContent | None = None
    """None for a block that cannot be found by its content."""
    filled_s: float = 0.0
    acquired_s: float = 0.0
    used_s: float = 0.0
    """The last acquisition or release."""
    num_reuses: int = 0


class BlockPool:
    """Owns the free queue, ref counts, block hashes and the order of eviction; nothing else writes them.

    A block is active (ref_count > 0), cached (no owner, still hashed) or free; the three sum to the pool::

        free --allocate--> active --release--> cached (hashed) or free
                             ^--- acquire ----- cached --allocate (evicts the first)---> active
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int, BlockEvicted], None], share_blocks: int | None = None) -> None:
        """`on_evict` is told the block, whose content stays until its next owner writes. `share_blocks` is a tenant's share of the pool;
        with None the least recently used cached block of all is evicted."""
        self._blocks = [Block() for _ in range(num_blocks)]
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: EvictionOrder[int] = make_order(share_blocks)
        self._by_hash: dict[BlockHash, int] = {}
        self._siblings = BlockSiblings()
        self._on_evict = on_evict

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks without owner and without content."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without owner that are still hashed."""
        return len(self._cached)

    @property
    def num_active_blocks(self) -> int:
        """Blocks with an owner."""
        return len(self._blocks) - len(self._free) - len(self._cached)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be allocated now, if nobody's share is in the way: free ones, and cached ones by eviction."""
        return len(self._free) + len(self._cached)

    def num_available_to(self, tenant: str) -> int:
        """Of these, the blocks that this tenant can be given."""
        return self._cached.num_obtainable(tenant, len(self._free))

    def is_share_used_up(self, tenant: str) -> bool:
        """Whether this tenant has its share of the pool, so that what other tenants cache within theirs is kept from it."""
        return self._cached.is_used_up(tenant)

    def find(self, block_hash: BlockHash) -> int | None:
        """The resident block with this content, if any."""
        return self._by_hash.get(block_hash)

    def leading(self, block_hashes: Iterable[BlockHash]) -> list[int]:
        """The resident blocks with these contents, up to the first that is missing; asks for no hash behind it."""
        find, block_ids = self._by_hash.get, list[int]()
        for block_hash in block_hashes:
            block_id = find(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_owned(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks have an owner."""
        blocks = self._blocks
        return sum([blocks[block_id].ref_count > 0 for block_id in block_ids])

    def ref_count(self, block_id: int) -> int:
        """Requests that hold the block."""
        return self._blocks[block_id].ref_count

    def block_hash(self, block_id: int) -> BlockHash | None:
        """The hash under which the block can be found, if any."""
        content = self._blocks[block_id].content
        return None if content is None else content.block_hash

    def sibling_common_tokens(self, parent_key: bytes, token_ids: Sequence[int]) -> int | None:
        """Most leading tokens that a resident block of the same parent shares with these; None without such a block."""
        return self._siblings.longest_common_prefix(parent_key, tuple(token_ids))

    def glimpse(self, block_ids: Iterable[int]) -> list[tuple[int, bool, float]]:
        """(owners, whether it is hashed, last use in s where it is) of blocks. From any thread: what it sees may be a step old."""
        return [(b.ref_count, b.content is not None, b.used_s) for b in map(self._blocks.__getitem__, block_ids)]

    def cached_order(self) -> list[int]:
        """Cached blocks, the least recently used first: where tenants have no shares, the next to be evicted first."""
        return list(self._cached)

    def allocate(self, num_blocks: int, now_s: float, tenant: str = "") -> list[int]:
        """Take blocks for new content: never-hashed ones first, then cached ones, which are evicted in their order.

        The caller has checked `num_available_to`.
        """
        assert num_blocks <= self.num_available_blocks, f"{num_blocks} blocks asked, {self.num_available_blocks} available"
        block_ids = [self._free.popleft() for _ in range(min(num_blocks, len(self._free)))]
        self._cached.note_taken(block_ids, tenant)
        block_ids += [self._evict(tenant, now_s) for _ in range(num_blocks - len(block_ids))]
        for block_id in block_ids:
            self._blocks[block_id].ref_count = 1
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add an owner to each of these hashed blocks."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                del self._cached[block_id]
            block.ref_count += 1

    def note_use(self, block_ids: Iterable[int], reader: str, now_s: float) -> list[float]:
        """Record an acquisition of hashed blocks; returns the seconds since the one before, for readers that are not the writer."""
        gaps = []
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.content is not None and block.content.writer != reader:
                block.num_reuses += 1
                gaps.append(now_s - block.acquired_s)
            block.acquired_s = block.used_s = now_s
        return gaps

    def publish(self, block_id: int, content: BlockContent, now_s: float) -> bool:
        """Make an owned block findable. False if its content is resident already: then only the first block stays hashed."""
        block = self._blocks[block_id]
        assert block.ref_count > 0, f"block {block_id} is published without an owner"
        assert block.content is None, f"block {block_id} is published twice"
        if content.block_hash in self._by_hash:
            return False
        self._by_hash[content.block_hash] = block_id
        block.content = content
        block.filled_s = block.acquired_s = block.used_s = now_s
        block.num_reuses = 0
        self._siblings.add(content.parent_key, content.token_ids)
        return True

    def release(self, block_ids: Sequence[int], now_s: float) -> None:
        """Drop one owner of each block of a table. The tail becomes older than the head, so eviction takes leaves first."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is released by nobody"
            block.ref_count -= 1
            block.used_s = now_s
            if block.ref_count:
                continue
            if block.content is None:
                self._give_back(block_id)
            else:
                self._cached[block_id] = None

    def unpublish(self, block_ids: Iterable[int]) -> list[BlockHash]:
        """Make blocks unfindable; their owners keep them. Returns the hashes that they had."""
        block_hashes = list[BlockHash]()
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.content is not None:
                block_hashes.append(self._forget(block))
                if block.ref_count == 0:
                    del self._cached[block_id]
                    self._give_back(block_id)
        return block_hashes

    def has_hashed_blocks(self) -> bool:
        """Whether any block, owned or not, can be found by its content."""
        return bool(self._by_hash)

    def _give_back(self, block_id: int) -> None:
        self._cached.note_freed(block_id)
        self._free.append(block_id)

    def _evict(self, tenant: str, now_s: float) -> int:
        block_id, loser = self._cached.pop_first(tenant)
        self._cached.note_taken((block_id,), tenant)
        block = self._blocks[block_id]
        block_hash, lifetime_s, idle_s = self._forget(block), now_s - block.filled_s, now_s - block.used_s
        self._on_evict(block_id, BlockEvicted(block_hash, now_s, block.num_reuses, lifetime_s, idle_s, loser))
        return block_id

    def _forget(self, block: Block) -> BlockHash:
        """Take a block out of the indexes; returns the hash it had."""
        content, block.content = block.content, None
        assert content is not None, "a cached block has no content"
        del self._by_hash[content.block_hash]
        self._siblings.remove(content.parent_key, content.token_ids)
        return content.block_hash

    def check_invariants(self) -> None:
        """Raises AssertionError when the pool contradicts itself."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is twice in the free queue"
        assert not free & cached, f"blocks {free & cached} are free and cached"
        for block_id, block in enumerate(self._blocks):
            assert block.ref_count >= 0, f"block {block_id} has {block.ref_count} owners"
            is_active = block_id not in free and block_id not in cached
            assert is_active == (block.ref_count > 0), f"block {block_id} has {block.ref_count} owners and lies in the wrong set"
            assert block_id not in free or block.content is None, f"free block {block_id} is hashed"
            assert block_id not in cached or block.content is not None, f"cached block {block_id} is not hashed"
        hashed = {block.content.block_hash: block_id for block_id, block in enumerate(self._blocks) if block.content is not None}
        assert hashed == self._by_hash, "the hash index disagrees with the blocks"
        assert self._siblings.num_blocks == len(hashed), "the sibling index disagrees with the hash index"
