"""Writing keys and values into paged memory, and where each token's slot is."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_slot_mapping(block_tables: Tensor, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """slot = block_tables[row, position // block_size] * block_size + position % block_size, in 64 bits.

    `block_tables` [R, max_blocks] of any integer dtype, `rows` and `positions` [T] int64; returns [T] int64.
    """
    blocks = block_tables[rows, positions // block_size].long()
    return blocks * block_size + positions % block_size


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """cache[slot_mapping[t]] = key[t], value[t], as `to_cache` has them. Changes the caches.

    `key` and `value` are [T, K, D], the caches [num_blocks, block_size, K, D] where blocks follow one another at a
    constant stride of slots, `slot_mapping` [T] int64 without repetitions.
    """
    for heads, cache in ((key, key_cache), (value, value_cache)):
        _slots(indexable(cache)).index_copy_(0, slot_mapping, indexable(to_cache(heads, cache.dtype)))


def to_cache(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values in a cache's dtype; one of 8 bits takes what is beyond its range as its largest, and NaN as NaN."""
    if heads.dtype != dtype and dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        heads = heads.clamp(-limit, limit)
    return heads.to(dtype)


def indexable(cache: Tensor) -> Tensor:
    """A view that torch can gather from and copy into: floats of 8 bits as bytes."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


def _slots(cache: Tensor) -> Tensor:
    """[num_blocks * block_size, K, D], a view: fails where the blocks are not evenly spaced."""
    num_blocks, block_size, num_heads, head_dim = cache.shape
    return cache.view(num_blocks * block_size, num_heads, head_dim)
