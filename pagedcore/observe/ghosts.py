"""Bounded memories of block hashes: what was evicted lately and when, and what was ever evicted."""

from __future__ import annotations

from collections.abc import Sequence

from pagedcore.core.lookup import BlockHash

_KEY_BYTES = 8
"""Hashes are remembered by their first 8 bytes: at a million entries a false match has a chance of about 1e-13 a lookup."""

MAX_REMEMBERED_BLOCKS = 262_144
GHOSTS_PER_BLOCK = 4
SEEN_PER_BLOCK = 8


class RecentBlocks:
    """Owns the latest `capacity` distinct hashes at least, and twice as many at most, each with its latest time.

    Two generations: new entries go into the young one; when that holds `capacity`, it becomes the old one and the
    former old one is forgotten. Every hash costs constant time.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._young: dict[bytes, float] = {}
        self._old: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    def remember(self, block_hashes: Sequence[BlockHash], times_s: Sequence[float]) -> None:
        """Make hashes the newest, the last one most."""
        start = 0
        while start < len(block_hashes):
            end = start + self._capacity - len(self._young)
            keys = [block_hash[:_KEY_BYTES] for block_hash in block_hashes[start:end]]
            self._young.update(zip(keys, times_s[start:end], strict=True))
            if len(self._young) >= self._capacity:
                self._old, self._young = self._young, {}
            start = end

    def time_of(self, block_hash: BlockHash) -> float | None:
        """When the hash was last remembered; None where it is not, or no longer, known."""
        key = block_hash[:_KEY_BYTES]
        time_s = self._young.get(key)
        return self._old.get(key) if time_s is None else time_s


class BlockHistory:
    """Owns the ghosts (hashes evicted lately) and the seen hashes (evicted at any time) of one engine.

    Every block that was computed and dropped to make room has been evicted, so a block that is neither resident nor seen was
    never computed: also when a request asked for it and ended first. At its cap the seen memory forgets the hashes evicted
    longest ago, so the ideal rate becomes that of a cache of at least `min(max(8 * num_blocks, 65_536), 262_144)` blocks: a lower
    bound of the unbounded one.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ghosts = RecentBlocks(min(max(GHOSTS_PER_BLOCK * num_blocks, 1_024), MAX_REMEMBERED_BLOCKS))
        self._seen = RecentBlocks(min(max(SEEN_PER_BLOCK * num_blocks, 65_536), MAX_REMEMBERED_BLOCKS))

    def evicted(self, block_hashes: Sequence[BlockHash], times_s: Sequence[float]) -> None:
        """Blocks lost their hashes to make room."""
        self._ghosts.remember(block_hashes, times_s)
        self._seen.remember(block_hashes, times_s)

    def evicted_at(self, block_hash: BlockHash) -> float | None:
        return self._ghosts.time_of(block_hash)

    def num_ideal_blocks(self, missed: Sequence[tuple[BlockHash, bool, bool]]) -> int:
        """How many blocks of `missed`, from its start, an unbounded cache would have served: resident ones, those that another
        request computes now, and seen ones."""
        for number, (block_hash, is_resident, is_computing) in enumerate(missed):
            if not (is_resident or is_computing) and self._seen.time_of(block_hash) is None:
                return number
        return len(missed)
