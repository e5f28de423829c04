"""How products with packed weights are launched: with what would take the least time, by the times that tiles were measured to take."""

from __future__ import annotations

import functools
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
import triton

from pagedcore_kernels.packed_weights import PackedWeights
from pagedcore_kernels.triton_ops.attention_common import Card
from pagedcore_kernels.triton_ops.split_k import MAX_PARTIALS


@dataclass(frozen=True, slots=True)
class FewRowsConfig:
    """How up to 16 rows are multiplied."""

    block_n: int
    num_warps: int = 4
    num_stages: int = 3
    splits: int = 1
    max_registers: int | None = None
    """Of a thread; None leaves it to the compiler."""
    prefetched_blocks: int = 2
    """Blocks of weights asked for before the wait for the kernel that makes x, where kernels may start early."""
    block_m: int = 8
    """Rows multiplied at once: 8, of which 16 are two turns, or 16."""


@dataclass(frozen=True, slots=True)
class ManyRowsConfig:
    """How more rows are multiplied, `block_m` by one program."""

    block_m: int
    block_n: int
    step: int
    """Words of each output taken at once."""
    num_warps: int = 8
    num_stages: int = 3
    splits: int = 1
    max_registers: int | None = None
    prefetched_blocks: int = 2


PackedConfig = FewRowsConfig | ManyRowsConfig


@dataclass(frozen=True, slots=True)
class Tile:
    """A configuration without its splits, and what a program costs with it."""

    config: PackedConfig
    programs_at_once: int
    """On one multiprocessor."""
    alone_us: float = 1.0
    """Time that a program takes for 256 inputs on a multiprocessor of its own. Of tiles that are not compared with others only the ratios
    of these times count.
    """
    shared_us: float = 0.0
    """What each program that shares the multiprocessor adds to that time, where they take longer than one alone."""
    other_us: float = 2.0
    """Its start and end."""
    split_us: float = 0.0
    """What the end takes longer where a part is stored and added."""
    dtype: torch.dtype | None = None
    """Of x, where the tile is for one type alone."""

    def round_us(self, num_inputs: int, num_sharing: int, *, is_split: bool) -> float:
        """Time of `num_sharing` programs on one multiprocessor, each of `num_inputs` inputs."""
        ends_us = self.other_us + (self.split_us if is_split else 0.0)
        return max(self.alone_us, self.shared_us * num_sharing) * num_inputs / 256 + ends_us


class ProductSize(NamedTuple):
    """What a choice depends on beside the bits and the card."""

    num_rows: int
    out_features: int
    num_blocks: int
    block_size: int


_FEW, _MANY = FewRowsConfig, ManyRowsConfig
ROW_BUCKETS = (8, 16, 32, 64, 128, 192, 256)
"""All rows of a bucket are multiplied as its most rows are, so that warm-up meets every kernel."""

# Bits -> what is chosen from for up to 8, 16, 32, 64 and more rows. The times are an H200's, of groups of 128: those with which choices
# for 19 matrices come closest to the fastest that was measured (`bench.kernels.w4_fit`; `bench.kernels.w4_results` says how close).
LARGE_TILES: dict[int, tuple[tuple[Tile, ...], ...]] = {
    4: (
        (
            Tile(_FEW(64, 2, 4), 5, 1.15, 0.01, 2.49, 1.05),
            Tile(_FEW(64, 2, 5), 4, 0.97, 0.02, 1.65, 1.67),
            Tile(_FEW(128, 4), 3, 1.1, 0.42, 4.05, 0.09),
        ),
        (
            Tile(_FEW(64, 2, 4), 4, 1.13, 0.09, 3.19, 0.92),
            Tile(_FEW(64, 2, 5), 3, 0.96, 0.4, 0.62, 2.08),
            Tile(_FEW(64, 2, max_registers=168, block_m=16), 6, 1.45, 0.27, 5.18, 0.29, torch.bfloat16),
            Tile(_FEW(64, 2, max_registers=200, block_m=16), 6, 1.4, 0.27, 5.1, 0.28, torch.float16),
            Tile(_FEW(128, 2), 4, 1.9, 0.52, 6.54, 0.56),
        ),
        (
            Tile(_MANY(32, 64, 64, 4), 3, 1.26, 0.44, 1.95, 2.12),
            Tile(_MANY(32, 64, 64, 4, 4), 2, 0.89, 0.49, 2.51, 1.42),
            Tile(_MANY(32, 128, 64, 4), 2, 1.2, 0.73, 2.88, 3.08),
        ),
        (
            Tile(_MANY(64, 64, 64, 4, 2), 3, 1.81, 0.69, 1.33, 4.16),
            Tile(_MANY(64, 64, 64, 4), 2, 1.03, 0.62, 2.61, 2.88),
            Tile(_MANY(64, 64, 64, 4, 4), 1, 0.89, 0.71, 1.26, 2.06),
            Tile(_MANY(64, 128, 64, 4, 2), 2, 1.99, 1.24, 1.78, 6.21),
        ),
        (
            Tile(_MANY(64, 64, 64, 4, 2), 3, 1.43, 0.69, 2.76, 1.56),
            Tile(_MANY(64, 64, 64, 4), 2, 1.09, 0.67, 1.42, 2.45),
            Tile(_MANY(64, 128, 32, 4), 3, 2.86, 1.22, 3.28, 2.98),
            Tile(_MANY(128, 64, 32, 4, 2), 3, 3.24, 1.23, 2.52, 5.23),
            Tile(_MANY(128, 256, 32), 1, 3.4, 0.05, 10.82, 10.62),
        ),
    ),
    8: (
        (
            Tile(_FEW(64, 2, 5), 5, 1.98, 0.41, 1.61, 1.92),
            Tile(_FEW(128, 4), 4, 1.74, 0.77, 3.88, 1.84),
            Tile(_FEW(128, 2), 6, 1.71, 1.07, 5.17, 1.6),
        ),
        (
            Tile(_FEW(128, 8, block_m=16), 2, 1.48, 0.96, 1.57, 2.24),
            Tile(_MANY(16, 128, 64, 4), 3, 2.09, 0.94, 1.95, 2.49),
        ),
        (
            Tile(_MANY(32, 64, 64, 4, 4), 3, 1.41, 0.54, 2.68, 1.92),
            Tile(_MANY(32, 128, 64, 4), 3, 1.14, 0.9, 9.21, 2.33),
            Tile(_MANY(32, 128, 64), 2, 1.73, 1.05, 1.93, 3.61),
        ),
        (
            Tile(_MANY(64, 64, 64, 4), 3, 1.73, 0.69, 1.81, 4.5),
            Tile(_MANY(64, 64, 64, 4, 4), 2, 1.32, 0.75, 2.34, 2.63),
        ),
        (
            Tile(_MANY(64, 64, 64, 4), 3, 1.63, 0.72, 0.78, 2.16),
            Tile(_MANY(128, 64, 64, 4), 2, 1.6, 0.93, 5.28, 4.12),
            Tile(_MANY(128, 128, 32, 4), 2, 3.27, 0.05, 9.88, 7.69),
        ),
    ),
}
# Cards with 99 KiB of shared memory for a program get smaller tiles, which nobody measured.
_SMALL_TILES: tuple[tuple[Tile, ...], ...] = (
    (Tile(_FEW(64, 2), 3),),
    (Tile(_FEW(64, 2, max_registers=168), 2),),
    (Tile(_MANY(32, 64, 32, 4), 2, split_us=2.0),),
    (Tile(_MANY(64, 64, 32, 4, 2), 2, split_us=4.0),),
    (Tile(_MANY(64, 128, 32, 8, 2), 1, split_us=8.0),),
)
SPLITS = (1, 2, 3, 4, 6, 8)

_MAX_PACKED_ROWS = 256
"""Above, the weights are written out and multiplied by torch. On an H200 that took 1 to 48 % longer at 256 rows for 15 of 16 matrices and
types, and 15 % less for one, 3584 x 4608; a third tile of 128 rows turns it round for all of them."""


def multiplies_packed(num_rows: int) -> bool:
    """Whether this many rows are multiplied with the packed weights, and not with a plain copy that is made for the one product."""
    return num_rows <= _MAX_PACKED_ROWS


def choose_packed_config(num_rows: int, packed: PackedWeights, dtype: torch.dtype, card: Card) -> PackedConfig:
    """The configuration for a product of up to 256 rows of `dtype` on `card`: the tile and the splits that would take the least time."""
    size = ProductSize(bucket_of(num_rows), packed.out_features, packed.num_blocks, packed.block_size)
    return _choose(size, packed.bits, dtype, card)


def bucket_of(num_rows: int) -> int:
    """The most rows that are multiplied as these are. Raises ValueError for more than are multiplied with packed weights."""
    if not multiplies_packed(num_rows):
        raise ValueError(f"up to {_MAX_PACKED_ROWS} rows are multiplied with packed weights, not {num_rows}")
    return ROW_BUCKETS[bisect_left(ROW_BUCKETS, num_rows)]


@functools.cache
def _choose(size: ProductSize, bits: int, dtype: torch.dtype, card: Card) -> PackedConfig:
    bucket = tiles_of(_SMALL_TILES if card.shared_bytes < 128 << 10 else LARGE_TILES[bits], size.num_rows)
    tiles = [tile for tile in bucket if tile.dtype in (None, dtype)]
    choices = product(tiles, [splits for splits in SPLITS if splits <= most_splits(size)])
    tile, splits = min(choices, key=lambda choice: product_us(choice[0], choice[1], size, card))
    return replace(tile.config, splits=splits)


def tiles_of(tiles: tuple[tuple[Tile, ...], ...], num_rows: int) -> tuple[Tile, ...]:
    """Those for so many rows: the last for all above 64."""
    return tiles[min(bisect_left(ROW_BUCKETS, num_rows), len(tiles) - 1)]


def most_splits(size: ProductSize) -> int:
    """As many as there is space for their parts."""
    return max(1, MAX_PARTIALS // (size.num_rows * size.out_features))


def product_us(tile: Tile, splits: int, size: ProductSize, card: Card) -> float:
    """Rounds of programs times what one takes; those of the last round share a multiprocessor with fewer."""
    row_tiles = triton.cdiv(size.num_rows, tile.config.block_m) if isinstance(tile.config, ManyRowsConfig) else 1
    num_programs = triton.cdiv(size.out_features, tile.config.block_n) * row_tiles * splits
    full_rounds, rest = divmod(num_programs, tile.programs_at_once * card.num_multiprocessors)
    sharing = [tile.programs_at_once] * full_rounds + [triton.cdiv(rest, card.num_multiprocessors)] * (rest > 0)
    num_inputs = triton.cdiv(size.num_blocks, splits) * size.block_size
    return sum(tile.round_us(num_inputs, num_sharing, is_split=splits > 1) for num_sharing in sharing)
