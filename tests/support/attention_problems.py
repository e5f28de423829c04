"""Random attention problems for the Triton kernels: NaN in every slot that no query sees, the reference's answers beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcore_kernels import indexable, paged_attention, to_cache
from pagedcore_kernels.triton_ops.attention_decode import paged_attention_decode
from pagedcore_kernels.triton_ops.attention_prefill import paged_attention_prefill
from pagedcore_kernels.triton_ops.attention_prefill_cudnn import paged_attention_prefill_cudnn
from pagedcore_kernels.triton_ops.attention_settings import DecodeConfig, PrefillConfig, PrefixConfig
from pagedcore_kernels.triton_ops.attention_shared_prefix import paged_attention_decode_shared

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a problem looks like; the queries of a sequence are its last tokens."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 3
    num_kv_heads: int = 1
    head_dim: int = 64
    block_size: int = 16
    sliding_window: int | None = None
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


class Problem:
    """Tensors of one problem on one device. `cache` is what kernels get, `clean` the same with zeros in place of NaN."""

    def __init__(self, sizes: Sizes, device: str = "cpu", seed: int = 0, num_extra_blocks: int = 3) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.sizes = sizes
        counts = [-(-seq_len // sizes.block_size) for seq_len in sizes.seq_lens]
        num_blocks = sum(counts) + num_extra_blocks
        self.block_tables = _permuted_tables(counts, num_blocks, generator, device)
        self.seq_lens = torch.tensor(sizes.seq_lens, dtype=torch.int32, device=device)
        self.query_start_loc = torch.tensor([0, *sizes.query_lens], device=device).cumsum(0).int()
        self.query = _normal((sum(sizes.query_lens), sizes.num_heads, sizes.head_dim), sizes.dtype, generator)
        shape = (num_blocks, sizes.block_size, 2 * sizes.num_kv_heads, sizes.head_dim)
        self.clean = to_cache(_normal(shape, sizes.dtype, generator), sizes.cache_dtype or sizes.dtype)
        self.cache = torch.full_like(self.clean, float("nan"))
        for row, (query_len, seq_len) in enumerate(zip(sizes.query_lens, sizes.seq_lens, strict=True)):
            first = 0 if sizes.sliding_window is None else max(0, seq_len - query_len - sizes.sliding_window + 1)
            self._reveal(row, torch.arange(first, seq_len, device=device))

    def _reveal(self, row: int, positions: Tensor) -> None:
        blocks = self.block_tables[row].long()[positions // self.sizes.block_size]
        slots = positions % self.sizes.block_size
        indexable(self.cache)[blocks, slots] = indexable(self.clean)[blocks, slots]

    def keys(self, cache: Tensor) -> Tensor:
        return cache[:, :, : self.sizes.num_kv_heads]

    def values(self, cache: Tensor) -> Tensor:
        return cache[:, :, self.sizes.num_kv_heads :]

    def expected(self) -> Tensor:
        """The reference in float32 on the clean cache."""
        return paged_attention(
            self.query.float(),
            self.keys(self.clean).float(),
            self.values(self.clean).float(),
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
            scale=self.sizes.scale,
            sliding_window=self.sizes.sliding_window,
            soft_cap=self.sizes.soft_cap,
            out=torch.zeros(self.query.shape, device=self.query.device),
        )

    def decode(self, config: DecodeConfig | None = None, max_seq_len: int | None = None, **options: object) -> Tensor:
        return paged_attention_decode(
            self.query,
            self.keys(self.cache),
            self.values(self.cache),
            self.block_tables,
            self.seq_lens,
            scale=self.sizes.scale,
            sliding_window=self.sizes.sliding_window,
            soft_cap=self.sizes.soft_cap,
            max_seq_len=max_seq_len or max(self.sizes.seq_lens),
            config=config,
            **{"out": torch.full_like(self.query, float("nan")), **options},
        )

    def prefill(self, config: PrefillConfig | None = None, **options: object) -> Tensor:
        return paged_attention_prefill(
            self.query,
            self.keys(self.cache),
            self.values(self.cache),
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
            scale=self.sizes.scale,
            sliding_window=self.sizes.sliding_window,
            soft_cap=self.sizes.soft_cap,
            max_query_len=max(self.sizes.query_lens),
            config=config,
            **{"out": torch.full_like(self.query, float("nan")), **options},
        )

    def mixed(self, num_decodes: int) -> Tensor:
        """The first sequences, of one query each, are decoded; the others prefilled into the same result."""
        out = torch.full_like(self.query, float("nan"))
        caches = (self.keys(self.cache), self.values(self.cache))
        options = {"scale": self.sizes.scale, "sliding_window": self.sizes.sliding_window, "soft_cap": self.sizes.soft_cap}
        first, rest = slice(num_decodes), slice(num_decodes, None)
        if num_decodes:
            longest = max(self.sizes.seq_lens)
            tables, seq_lens = self.block_tables[first], self.seq_lens[first]
            paged_attention_decode(self.query[first], *caches, tables, seq_lens, max_seq_len=longest, out=out[first], **options)
        if num_decodes < len(self.sizes.seq_lens):
            tables, seq_lens, locations = self.block_tables[rest], self.seq_lens[rest], self.query_start_loc[rest]
            most = max(self.sizes.query_lens)
            paged_attention_prefill(self.query, *caches, tables, seq_lens, locations, max_query_len=most, out=out, **options)
        return out

    def share(self, num_blocks: int, alone: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """From now on all sequences but those `alone` and of length 0 begin with the first blocks of the first one that does.

        Their table, which names no block behind them, and how many keys of it each sequence begins with.
        """
        shares = self.seq_lens > 0
        shares[list(alone)] = False
        prefix_table = self.block_tables[0].clone()
        if bool(shares.any()):
            prefix_table = self.block_tables[shares][0].clone()
            self.block_tables[shares, :num_blocks] = prefix_table[:num_blocks]
        prefix_table[num_blocks:] = 2**31 - 1
        return prefix_table, shares.int() * num_blocks * self.sizes.block_size

    def decode_shared(self, prefix: tuple[Tensor, Tensor], config: PrefixConfig | None = None, **options: object) -> Tensor:
        return paged_attention_decode_shared(
            self.query,
            self.keys(self.cache),
            self.values(self.cache),
            *prefix,
            self.block_tables,
            self.seq_lens,
            scale=self.sizes.scale,
            soft_cap=self.sizes.soft_cap,
            max_prefix_len=2100,
            max_seq_len=max(self.sizes.seq_lens),
            config=config,
            **{"out": torch.full_like(self.query, float("nan")), **options},
        )

    def prefill_cudnn(self, **options: object) -> Tensor:
        """The one sequence of the problem, without window or cap."""
        return paged_attention_prefill_cudnn(
            self.query,
            self.keys(self.cache),
            self.values(self.cache),
            self.block_tables[0],
            seq_len=self.sizes.seq_lens[0],
            scale=self.sizes.scale,
            **options,
        )

    def assert_placed(self, attend: Callable[..., Tensor], seed: int = 0) -> None:
        """What `attend` gives with places in a random order has each element at its place."""
        num_elements = self.sizes.num_heads * self.sizes.head_dim
        places = torch.randperm(num_elements, generator=torch.Generator().manual_seed(seed)).int().to(self.query.device)
        placed = attend(out_places=places)
        self.assert_close(placed.flatten(1)[:, places.long()].view_as(placed))

    def assert_close(self, actual: Tensor) -> None:
        tolerance = TOLERANCE[self.sizes.dtype]
        torch.testing.assert_close(actual.float(), self.expected(), atol=tolerance, rtol=tolerance)


def _permuted_tables(counts: list[int], num_blocks: int, generator: torch.Generator, device: str) -> Tensor:
    """[S, max_blocks]; entries behind a sequence's last block name no block at all."""
    order = torch.randperm(num_blocks, generator=generator, device=device).int()
    tables = torch.full((len(counts), max(counts) + 2), 2**31 - 1, dtype=torch.int32, device=device)
    first = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[first : first + count]
        first += count
    return tables


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Drawn in the dtype itself: no larger copy of a large pool."""
    return torch.empty(shape, dtype=dtype, device=generator.device).normal_(generator=generator)
