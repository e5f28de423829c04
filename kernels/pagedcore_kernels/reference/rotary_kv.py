"""What comes between the query-key-value product of a layer and its attention, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedcore_kernels.reference.kv_cache import indexable, to_cache
from pagedcore_kernels.reference.rms_norm import rms_norm
from pagedcore_kernels.reference.rotary import rotary


def rotate_and_write_kv(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    num_heads: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys by their positions and write keys and values to their slots; the rotated query [T, H, D].

    `qkv` is [T, H + 2 K, D]: query, key and value heads of each token. `cos_sin` [P, D] holds the cosines of a position's D/2
    pairs, then their sines; `positions` [T] int64 choose its rows. With `query_norm` and `key_norm` [D] each query and key head
    passes an RMS norm first. The caches are [num_blocks, block_size, K, D]; `slot_mapping` [T] int64 names each token's slot, and
    a token whose slot is -1 writes nothing. An 8-bit cache takes values beyond its range as its largest,
    and NaN as NaN. Changes the caches.
    """
    num_kv_heads = key_cache.shape[2]
    query_key, value = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
    if query_norm is not None and key_norm is not None:
        weight = torch.cat((query_norm.expand(num_heads, -1), key_norm.expand(num_kv_heads, -1)))
        query_key = rms_norm(query_key, weight, eps=eps)
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    query_key = rotary(query_key, cos, sin)
    is_kept = slot_mapping >= 0
    slots = slot_mapping[is_kept]
    _write(query_key[:, num_heads:][is_kept], key_cache, slots)
    _write(value[is_kept], value_cache, slots)
    query = query_key[:, :num_heads]
    return query.contiguous() if out is None else out.copy_(query)


def _write(heads: Tensor, cache: Tensor, slots: Tensor) -> None:
    block_size = cache.shape[1]
    indexable(cache)[slots // block_size, slots % block_size] = indexable(to_cache(heads, cache.dtype))
