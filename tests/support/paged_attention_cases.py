"""Random paged attention problems, and the dense answer that every implementation must give. For CPU and CUDA tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcore.batch import KVLayout
from pagedcore.runtime.inputs import PassInputs
from pagedcore.runtime.kv_cache import KVCache
from pagedcore_kernels import compute_slot_mapping, indexable, to_cache

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class PagedCase:
    """One layer's cache with the contexts already in it, and the tokens of one pass still to be written."""

    cache: KVCache
    inputs: PassInputs
    query: Tensor
    key: Tensor
    value: Tensor
    keys: list[Tensor]
    """Dense keys of each sequence, [L, K, D]."""
    values: list[Tensor]

    def dense(self, scale: float, sliding_window: int | None) -> Tensor:
        """Attention over the dense keys in fp64."""
        parts = []
        for index, seq_len in enumerate(self.inputs.seq_lens):
            first, last = self.inputs.query_start_loc[index : index + 2]
            group_size = self.query.shape[1] // self.key.shape[1]
            keys = self.keys[index].double().repeat_interleave(group_size, 1)
            values = self.values[index].double().repeat_interleave(group_size, 1)
            scores = torch.einsum("qhd,lhd->hql", self.query[first:last].double(), keys) * scale
            distance = torch.arange(seq_len - (last - first), seq_len)[:, None] - torch.arange(seq_len)[None]
            visible = (distance >= 0) & (distance < (sliding_window or seq_len))
            scores.masked_fill_(~visible.to(scores.device), float("-inf"))
            parts.append(torch.einsum("hql,lhd->qhd", scores.softmax(-1), values))
        return torch.cat(parts)


def make_case(
    *,
    query_lens: list[int],
    context_lens: list[int],
    block_size: int = 16,
    num_heads: int = 3,
    num_kv_heads: int = 1,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> PagedCase:
    """Sequences over randomly permuted blocks; NaN in every block that no table names, junk in slots not written yet.

    All keys and values are such that `cache_dtype` holds them exactly.
    """
    generator = torch.Generator().manual_seed(seed)
    device = torch.device(device)
    seq_lens = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(counts) + 5
    cache = KVCache(
        KVLayout(num_layers=2, num_kv_heads=num_kv_heads, head_dim=head_dim),
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=cache_dtype or dtype,
        device=device,
    )
    cache.data[:, :num_blocks] = float("nan")
    order = torch.randperm(num_blocks, generator=generator)
    tables = torch.full((len(counts), max(counts) + 2), num_blocks - 1, dtype=torch.int32)
    keys, values, first = [], [], 0
    for index, (seq_len, count) in enumerate(zip(seq_lens, counts, strict=True)):
        blocks = order[first : first + count]
        first += count
        tables[index, :count] = blocks.int()
        for block in blocks.tolist():
            cache.data[:, block] = 400.0
        kv = to_cache(torch.randn(seq_len, 2 * num_kv_heads, head_dim, generator=generator).to(device), cache.data.dtype).to(dtype)
        slots = _slots(tables, index, torch.arange(context_lens[index]), block_size).to(device)
        indexable(cache.data[1]).flatten(0, 1)[slots] = indexable(to_cache(kv[: context_lens[index]], cache.data.dtype))
        keys.append(kv[:, :num_kv_heads])
        values.append(kv[:, num_kv_heads:])
    query_start_loc = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
    positions = torch.cat([torch.arange(seq_len - query, seq_len) for seq_len, query in zip(seq_lens, query_lens, strict=True)])
    owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(query_lens))
    inputs = PassInputs(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        device_query_start_loc=torch.tensor(query_start_loc, dtype=torch.int32, device=device),
        device_seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        token_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
        positions=positions.to(device),
        slot_mapping=compute_slot_mapping(tables, owners, positions, block_size).to(device),
        block_tables=tables.to(device),
        logits_indices=torch.zeros(0, dtype=torch.int64, device=device),
        opened_blocks=None,
    )
    return PagedCase(
        cache=cache,
        inputs=inputs,
        query=torch.randn(len(positions), num_heads, head_dim, generator=generator).to(device, dtype),
        key=torch.cat([k[-query:] for k, query in zip(keys, query_lens, strict=True)]),
        value=torch.cat([v[-query:] for v, query in zip(values, query_lens, strict=True)]),
        keys=keys,
        values=values,
    )


def _slots(tables: Tensor, row: int, positions: Tensor, block_size: int) -> Tensor:
    return compute_slot_mapping(tables, torch.full_like(positions, row), positions, block_size)
