"""What one engine's prefix cache is believed to hold, seen from outside it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pagedcore.routing.prefix_keys import PrefixKey

MAX_KNOWN_BLOCKS = 65_536
"""Blocks remembered of one engine at most, about 10 MB."""


class KnownPrefixes:
    """Owns the keys of blocks that were sent to one engine, as many as its pool has blocks: the least recently used one goes first.

    Of a prompt that was just seen its last block goes first, so that what is remembered stays a prefix, as in the engine's own pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._capacity = min(num_blocks, MAX_KNOWN_BLOCKS)
        self._keys: OrderedDict[PrefixKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def count_leading(self, keys: Sequence[PrefixKey]) -> int:
        """How many blocks at the beginning of a prompt are known. Changes nothing."""
        for index, key in enumerate(keys):
            if key not in self._keys:
                return index
        return len(keys)

    def add(self, keys: Sequence[PrefixKey]) -> None:
        """A prompt went to the engine: its blocks are the most recently used ones."""
        for key in reversed(keys[: self._capacity]):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """The engine is gone, and its pool with it."""
        self._keys.clear()
