"""Paged attention: decode reads keys and values once, prefill multiplies."""

# ruff: noqa: TID253 - only the command that needs a GPU imports this folder

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from pagedcore.commands.bench.roofline.case import Case, Shape, Work
from pagedcore_kernels import paged_attention
from pagedcore_kernels.triton_ops.attention_decode import paged_attention_decode
from pagedcore_kernels.triton_ops.attention_prefill import paged_attention_prefill
from pagedcore_kernels.triton_ops.attention_prefill_cudnn import paged_attention_prefill_cudnn

BLOCK_SIZE = 16
DECODES = ((1, 2048), (64, 2048), (256, 1024), (1, 32768))
"""Sequences, and tokens of each."""
PREFILLS = ((2048, 0), (8192, 0), (8192, 8192))
"""New tokens of one sequence, and those before them that are cached."""
CHECKED_QUERIES = 64


def attention_cases(
    shape: Shape, *, has_cudnn: bool, decodes: Sequence[tuple[int, int]] = DECODES, prefills: Sequence[tuple[int, int]] = PREFILLS
) -> Iterator[Case]:
    """With `has_cudnn` each prefill twice: by our kernel, and gathered for cuDNN, as the engine does where it is faster."""
    kv_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.itemsize
    for batch, context in decodes:
        moved = batch * (context * kv_bytes + 2 * shape.num_heads * shape.head_dim * shape.itemsize)
        yield Case("decode attention", f"{batch} x {context}", "read", moved, partial(decode, shape, batch, context))
    for num_queries, num_cached in prefills:
        products = 4 * shape.num_heads * shape.head_dim * (num_queries * num_cached + num_queries**2 / 2)
        work = f"{num_queries} after {num_cached}"
        for name, gathers in (("prefill attention", False), ("prefill, cuDNN", True))[: 1 + has_cudnn]:
            make = partial(prefill, shape, num_queries, num_cached, gathers=gathers)
            yield Case(name, work, "matmul", products, make, captures=False)


def decode(shape: Shape, batch: int, context: int) -> Work:
    """Sequences of one length over permuted blocks; each call has blocks of its own."""
    blocks_each = math.ceil(context / BLOCK_SIZE)
    num_sets = shape.num_sets(batch * blocks_each * BLOCK_SIZE * 2 * shape.num_kv_heads * shape.head_dim * shape.itemsize)
    keys, values, order = _caches(shape, num_sets * batch * blocks_each)
    tables = order.view(num_sets, batch, blocks_each)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=shape.device)
    query = shape.randn(batch, shape.num_heads, shape.head_dim)
    scale = shape.head_dim**-0.5
    rows = sorted({0, batch // 2, batch - 1})

    def attend(table: Tensor) -> Tensor:
        return paged_attention_decode(query, keys, values, table, lengths, scale=scale, max_seq_len=context)

    def expected() -> Tensor:
        starts = torch.arange(len(rows) + 1)
        return paged_attention(query[rows].float(), keys, values, tables[0][rows], lengths[rows], starts, scale=scale)

    return Work([partial(attend, table) for table in tables], expected, compared=lambda result: result[rows])


def prefill(shape: Shape, num_queries: int, num_cached: int, *, gathers: bool) -> Work:
    """One sequence; its last queries are compared, which see the most."""
    seq_len = num_queries + num_cached
    keys, values, order = _caches(shape, math.ceil(seq_len / BLOCK_SIZE))
    table, lengths = order.view(1, -1), torch.tensor([seq_len], dtype=torch.int32, device=shape.device)
    starts = torch.tensor([0, num_queries], dtype=torch.int32, device=shape.device)
    query = shape.randn(num_queries, shape.num_heads, shape.head_dim)
    scale, compared = shape.head_dim**-0.5, min(CHECKED_QUERIES, num_queries)

    def attend() -> Tensor:
        if gathers:
            return paged_attention_prefill_cudnn(query, keys, values, table[0], seq_len=seq_len, scale=scale)
        return paged_attention_prefill(query, keys, values, table, lengths, starts, scale=scale, max_query_len=num_queries)

    def expected() -> Tensor:
        own_starts = torch.tensor([0, compared])
        return paged_attention(query[-compared:].float(), keys, values, table, lengths, own_starts, scale=scale)

    return Work([attend], expected, compared=lambda result: result[-compared:])


def _caches(shape: Shape, num_blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of one pool as an engine lays them out, and its blocks in random order."""
    heads = shape.num_kv_heads
    pool = torch.empty(num_blocks, BLOCK_SIZE, 2 * heads, shape.head_dim, dtype=shape.dtype, device=shape.device).normal_()
    return pool[:, :, :heads], pool[:, :, heads:], torch.randperm(num_blocks, device=shape.device).int()
