"""Bounded memories of block hashes: what was evicted and when, and what was ever asked for."""

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
    """Owns the ghosts (evicted hashes) and the seen hashes of one engine.

    At its cap the seen memory forgets the hashes not asked for longest, so the ideal rate becomes that of a cache of
    at least `min(max(8 * num_blocks, 65_536), 262_144)` blocks: a lower bound of the unbounded one.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ghosts = RecentBlocks(min(max(GHOSTS_PER_BLOCK * num_blocks, 1_024), MAX_REMEMBERED_BLOCKS))
        self._seen = RecentBlocks(min(max(SEEN_PER_BLOCK * num_blocks, 65_536), MAX_REMEMBERED_BLOCKS))

    def evicted(self, block_hashes: Sequence[BlockHash], times_s: Sequence[float]) -> None:
        """Blocks lost their hashes. Each was filled once, so it has been seen, also when generated and never looked up."""
        self._ghosts.remember(block_hashes, times_s)
        self._seen.remember(block_hashes, times_s)

    def evicted_at(self, block_hash: BlockHash) -> float | None:
        return self._ghosts.time_of(block_hash)

    def look_up_ideal(self, missed: Sequence[tuple[BlockHash, bool, bool]], now_s: float) -> int:
        """How many blocks of `missed`, from its start, an unbounded cache would have served; then all are seen.

        What is resident or being computed now was seen; a block counts as seen from its first lookup on.
        """
        num_served = 0
        for block_hash, is_resident, is_computing in missed:
            if not (is_resident or is_computing) and self._seen.time_of(block_hash) is None:
                break
            num_served += 1
        self._seen.remember([block_hash for block_hash, _, _ in missed], [now_s] * len(missed))
        return num_served
