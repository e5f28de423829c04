"""Whose blocks went to the host while their request waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pagedcore.host_tier.swapped import Swapped


class SwapWatch:
    """Owns the block hashes of preempted requests, from the preemption until they run again or end."""

    def __init__(self) -> None:
        self._hashes: dict[str, Sequence[bytes]] = {}
        self._owners: dict[bytes, list[str]] = {}
        self._swapped: set[str] = set()

    @property
    def num_swapped_requests(self) -> int:
        """Watched requests of which a block was copied out."""
        return len(self._swapped)

    def add(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        """Watch a request's blocks; another one may have the same."""
        self._hashes[request_id] = block_hashes
        for block_hash in block_hashes:
            self._owners.setdefault(block_hash, []).append(request_id)

    def remove(self, request_id: str) -> None:
        """Watch it no more. Unknown ids are ignored."""
        self._swapped.discard(request_id)
        for block_hash in self._hashes.pop(request_id, ()):
            owners = self._owners[block_hash]
            owners.remove(request_id)
            if not owners:
                del self._owners[block_hash]

    def note_copied(self, block_hashes: Iterable[bytes], now_s: float) -> tuple[Swapped, ...]:
        """These blocks are copied out: an event of each request that is concerned."""
        counts = Counter(request_id for block_hash in block_hashes for request_id in self._owners.get(block_hash, ()))
        self._swapped |= counts.keys()
        return tuple(Swapped(request_id, now_s, "out", num_blocks) for request_id, num_blocks in counts.items())
