"""Writing keys and values into paged memory, and where each token's slot is."""

from __future__ import annotations

from torch import Tensor


def compute_slot_mapping(block_tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """slot = block_tables[row, position // block_size] * block_size + position % block_size, in 64 bits.

    `block_tables` [R, max_blocks] of any integer dtype, `rows` and `positions` [T] int64; returns [T] int64.
    """
    blocks = block_tables[rows, positions // block_size].long()
    return blocks * block_size + positions % block_size


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """cache[slot_mapping[t]] = key[t], value[t]. Changes the caches.

    `key` and `value` are [T, K, D], the caches [num_blocks, block_size, K, D] where blocks follow one another at a
    constant stride of slots, `slot_mapping` [T] int64 without repetitions.
    """
    _slots(key_cache).index_copy_(0, slot_mapping, key)
    _slots(value_cache).index_copy_(0, slot_mapping, value)


def _slots(cache: Tensor) -> Tensor:
    """[num_blocks * block_size, K, D], a view: fails where the blocks are not evenly spaced."""
    num_blocks, block_size, num_heads, head_dim = cache.shape
    return cache.view(num_blocks * block_size, num_heads, head_dim)
