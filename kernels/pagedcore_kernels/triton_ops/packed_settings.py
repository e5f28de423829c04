"""How products with packed weights are launched: what was fastest where it was measured, a rule elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
class _Tile:
    """A configuration without its splits, and what a program costs with it."""

    config: PackedConfig
    programs_at_once: int
    """On one multiprocessor."""
    block_us: float = 1.0
    """Time that a program takes for 256 inputs; of tiles that are not compared with others only the ratio to `other_us` counts."""
    other_us: float = 2.0
    """Its start and end."""
    split_us: float = 0.0
    """What the end takes longer where a part is stored and added."""


_FEW, _MANY = FewRowsConfig, ManyRowsConfig
_BUCKETS = (8, 16, 32, 64, 128, 192)
"""The most rows of all columns of the table below but the last."""

# (in, out) -> the fastest for up to 8, 16, 32, 64, 128, 192 and more rows: 4 bits, groups of 128, float16, on an H200.
_SM90: dict[tuple[int, int], tuple[PackedConfig, ...]] = {
    (4096, 4096): (
        _FEW(64, 2, 5, splits=4), _FEW(128, 8, 3, splits=4, block_m=16), _MANY(32, 64, 64, 4, splits=4),
        _MANY(64, 64, 64, 4, 4, splits=2), _MANY(64, 64, 64, 4, splits=2), _MANY(64, 64, 64, 4, 2, splits=2), _MANY(64, 64, 64, 4),
    ),
    (4096, 12288): (
        _FEW(64, 2, splits=4), _FEW(64, 4, splits=2, block_m=16), _MANY(32, 64, 64, 4, splits=2),
        _MANY(64, 64, 64, 4, 2, splits=2), _MANY(64, 128, 32, 4, splits=2), _MANY(64, 128, 32, 4), _MANY(64, 128, 32, 4),
    ),
    (4096, 22016): (
        _FEW(64, 2, splits=2), _FEW(64, 2, splits=2, max_registers=200, block_m=16), _MANY(32, 64, 64, 4),
        _MANY(64, 128, 32, 4, splits=2), _MANY(64, 128, 32, 4), _MANY(64, 128, 32, 4), _MANY(128, 64, 32, 4, 2),
    ),
    (11008, 4096): (
        _FEW(64, 2, 5, splits=4), _FEW(128, 8, 3, splits=4, block_m=16), _MANY(32, 64, 64, 4, splits=4),
        _MANY(64, 64, 64, 4, splits=4), _MANY(64, 64, 64, 4, splits=2), _MANY(64, 128, 32, 4, splits=4), _MANY(128, 64, 64, 4),
    ),
}  # fmt: skip

# What the rule chooses from for up to 8, 16, 32, 64, 128 and more rows, with times as on an H200. Cards with 99 KiB
# of shared memory for a program get smaller tiles.
_LARGE_TILES: tuple[tuple[_Tile, ...], ...] = (
    (_Tile(_FEW(64, 2), 7, 1.4, 3.5),),
    (_Tile(_FEW(64, 4, block_m=16), 3, 1.0, 4.0),),
    (_Tile(_MANY(32, 64, 64, 4), 3, 1.1, 5.0),),
    (_Tile(_MANY(64, 64, 32, 4, 4), 2, 1.6, 7.0), _Tile(_MANY(64, 128, 32, 4), 3, 2.6, 12.0)),
    (_Tile(_MANY(64, 128, 32), 2, 2.3, 4.0, 4.0),),
    (_Tile(_MANY(64, 128, 32), 2, 2.3, 4.0, 4.0), _Tile(_MANY(128, 64, 32, 4, 2), 3, 3.2, 4.0, 10.0)),
)
_SMALL_TILES: tuple[tuple[_Tile, ...], ...] = (
    (_Tile(_FEW(64, 2), 3),),
    (_Tile(_FEW(64, 2, max_registers=168), 2),),
    (_Tile(_MANY(32, 64, 32, 4), 2, split_us=2.0),),
    (_Tile(_MANY(64, 64, 32, 4, 2), 2, split_us=4.0),),
    (_Tile(_MANY(64, 128, 32, 8, 2), 1, split_us=8.0),),
    (_Tile(_MANY(64, 128, 32, 8, 2), 1, split_us=8.0),),
)
_SPLITS = (1, 2, 3, 4, 8)

_MAX_PACKED_ROWS = 256
"""Above, the weights are written out and multiplied by torch. On an H200 that took 20 to 30 % longer at 256 rows for three of the four
measured shapes, and 3 % less for 4096 x 4096; a third tile of 128 rows turns it round for all of them."""


def multiplies_packed(num_rows: int) -> bool:
    """Whether this many rows are multiplied with the packed weights, and not with a plain copy that is made for the one product."""
    return num_rows <= _MAX_PACKED_ROWS


def choose_packed_config(num_rows: int, packed: PackedWeights, card: Card) -> PackedConfig:
    """The configuration for a product of `num_rows` rows on `card`: from measurements where there are some, else by rule."""
    sizes = (packed.in_features, packed.out_features)
    if card.capability == 90 and packed.bits == 4 and packed.slice_size == 64 and sizes in _SM90:
        return _SM90[sizes][_bucket(num_rows)]
    return config_by_rule(num_rows, packed, card)


def config_by_rule(num_rows: int, packed: PackedWeights, card: Card) -> PackedConfig:
    """The tile and the number of splits that would take the least time: rounds of programs times what one program takes."""
    buckets = _SMALL_TILES if card.shared_bytes < 128 << 10 else _LARGE_TILES
    tiles = buckets[min(_bucket(num_rows), len(buckets) - 1)]
    most_splits = max(1, MAX_PARTIALS // (num_rows * packed.out_features))
    choices = [(tile, splits) for tile in tiles for splits in _SPLITS if splits <= most_splits]

    def cost(choice: tuple[_Tile, int]) -> float:
        tile, splits = choice
        rounds = triton.cdiv(_num_programs(tile.config, num_rows, packed) * splits, tile.programs_at_once * card.num_multiprocessors)
        inputs = triton.cdiv(packed.num_blocks, splits) * packed.block_size
        return rounds * (inputs / 256 * tile.block_us + tile.other_us + (tile.split_us if splits > 1 else 0))

    tile, splits = min(choices, key=cost)
    return replace(tile.config, splits=splits)


def _num_programs(config: PackedConfig, num_rows: int, packed: PackedWeights) -> int:
    """Of one split."""
    row_tiles = triton.cdiv(num_rows, config.block_m) if isinstance(config, ManyRowsConfig) else 1
    return triton.cdiv(packed.out_features, config.block_n) * row_tiles


def _bucket(num_rows: int) -> int:
    return next((index for index, most in enumerate(_BUCKETS) if num_rows <= most), len(_BUCKETS))
