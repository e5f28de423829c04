"""Attention over paged keys and values, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedcore_kernels.reference.kv_cache import indexable


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out: Tensor | None = None,
    out_places: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q k^T + causal mask) v, for each sequence over the blocks of its table.

    `query` is [T, H, D], the caches are [num_blocks, block_size, K, D] (any strides), `block_tables` [S, max_blocks],
    `seq_lens` [S] counts all tokens of a sequence with the ones of this step, `query_start_loc` [S + 1] cuts `query`.
    The queries of a sequence are its last tokens. With a window of w, position p sees p - w + 1 ... p.
    With a soft cap of c, scaled scores s count as c * tanh(s / c).
    With `out_places` [H * D] element e of a token's heads, one after another, is stored as element out_places[e] of them.
    Slots that no query sees are never read into a sum. Returns [T, H, D] in the query's dtype, `out` if it is given.
    """
    result = torch.empty_like(query) if out is None else out
    starts = query_start_loc.tolist()
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        if first == last:
            continue
        keys = _gather(key_cache, block_tables[sequence], seq_len)  # [L, K, D]
        values = _gather(value_cache, block_tables[sequence], seq_len)
        attended = _attend(query[first:last], keys, values, scale, sliding_window, soft_cap)
        if out_places is not None:
            attended = torch.empty_like(attended).flatten(1).index_copy_(1, out_places.long(), attended.flatten(1)).view_as(attended)
        result[first:last] = attended.to(query.dtype)
    return result


def _gather(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    block_size = cache.shape[1]
    blocks = block_table[: -(-seq_len // block_size)].long()
    return indexable(cache)[blocks].view(cache.dtype).flatten(0, 1)[:seq_len]


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, sliding_window: int | None, soft_cap: float | None) -> Tensor:
    group_size = query.shape[1] // keys.shape[1]
    keys = keys.float().repeat_interleave(group_size, dim=1)  # [L, H, D]
    values = values.float().repeat_interleave(group_size, dim=1)
    scores = torch.einsum("qhd,lhd->hql", query.float(), keys) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores = scores.masked_fill(~_visible(query.shape[0], keys.shape[0], sliding_window, query.device), float("-inf"))
    return torch.einsum("hql,lhd->qhd", scores.softmax(dim=-1), values)


def _visible(num_queries: int, seq_len: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """[Q, L], True where the query may look."""
    query_positions = torch.arange(seq_len - num_queries, seq_len, device=device)[:, None]
    key_positions = torch.arange(seq_len, device=device)[None, :]
    visible = key_positions <= query_positions
    if sliding_window is not None:
        visible &= key_positions > query_positions - sliding_window
    return visible
