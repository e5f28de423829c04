"""Which blocks are remembered: one in 2^level, chosen by their keys alone, so the same ones whoever asks.

A sample of level n + 1 is part of that of level n.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedcore.advice.prefix_keys import KEY_BITS, KEY_SPACE

MAX_LEVEL = 24


def sample(keys: Sequence[int], level: int) -> Sequence[int]:
    """The numbers of the sampled blocks, of a prompt whose blocks have these keys."""
    if level == 0:
        return range(len(keys))
    end = 1 << (KEY_BITS - level)
    return [number for number, key in enumerate(keys) if key % KEY_SPACE < end]


def highest_level(key: int) -> int:
    """The last level at which the block is in the sample."""
    return KEY_BITS - (key % KEY_SPACE).bit_length()
