"""How products with 4-bit weights are launched, and the instructions that expand the codes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from pagedcore_kernels.triton_ops.attention_common import INTERPRETED, Card


@dataclass(frozen=True, slots=True)
class W4Config:
    """How up to 64 rows are multiplied."""

    block_n: int
    num_warps: int = 4
    num_stages: int = 3
    splits: int = 1
    max_registers: int | None = None
    """Of a thread; None leaves it to the compiler."""
    prefetched_blocks: int = 2
    """Blocks of weights asked for before the wait for the kernel that makes x, where kernels may start early."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Settings that depend on the rows of x alone, and how many such programs a multiprocessor holds at once."""

    config: W4Config
    programs_at_once: int


# For up to 8, 16, 32 and 64 rows. Cards with 99 KiB of shared memory for a program get smaller tiles.
_LARGE_TILES = (
    _Tile(W4Config(64, 2), 7),
    _Tile(W4Config(128, 4, max_registers=168), 3),
    _Tile(W4Config(128, 8), 2),
    _Tile(W4Config(128, 8), 1),
)
_SMALL_TILES = (
    _Tile(W4Config(64, 2), 3),
    _Tile(W4Config(64, 2, max_registers=168), 2),
    _Tile(W4Config(64, 4, 2), 2),
    _Tile(W4Config(64, 8, 2), 1),
)


def choose_w4_config(num_rows: int, out_features: int, in_features: int, card: Card) -> W4Config:
    """The configuration for a product of `num_rows` rows on `card`: a tile that suits the rows, and the splits that cost least."""
    tiles = _SMALL_TILES if card.shared_bytes < 128 << 10 else _LARGE_TILES
    tile = tiles[0 if num_rows <= 8 else 1 if num_rows <= 16 else 2 if num_rows <= 32 else 3]
    num_tiles = triton.cdiv(out_features, tile.config.block_n)
    num_blocks = triton.cdiv(in_features, 256)
    at_once = tile.programs_at_once * card.num_multiprocessors

    def cost(splits: int) -> float:
        """Rounds of programs times the blocks that each takes; start and end are worth two, a part that is stored and added its size."""
        own = triton.cdiv(num_blocks, splits) + 2 + (num_rows / 16 if splits > 1 else 0)
        return triton.cdiv(num_tiles * splits, at_once) * own

    return replace(tile.config, splits=min(range(1, min(8, num_blocks) + 1), key=cost))


@dataclass(frozen=True, slots=True)
class Expansion:
    """How a code inside a word becomes a number of a 16-bit float type, for two words at once.

    By slice, the number is `code / scale + offset`; where zero points are subtracted it is `code - zero`, from an operand
    that holds `-(offset + zero)`.
    """

    asm: tuple[str, ...] | None
    """One of each slice; None in the interpreter."""
    offsets: tuple[float, ...]
    scales: tuple[float, ...]


def choose_expansion(dtype: torch.dtype, *, subtract: bool) -> Expansion:
    """The instructions for one type.

    float16: a code in the lowest bits is a subnormal number as it stands, code * 2^-24, and code * 2^-20 four bits further up; or-ed
    into the bits of 1024 it is 1024 + code, or 1024 + 16 code. bfloat16 has seven bits below its exponent, and its subnormal
    numbers are too small: or-ed into the bits of 128, a code is 128 + code, after a shift for each slice.
    """
    if INTERPRETED:
        return Expansion(None, (0.0,) * 4, (1.0,) * 4)
    if dtype == torch.bfloat16:
        asm = tuple(_expand_asm(shift, "0x000F000F", "0x43004300", "bf16x2", "0x3F803F80", subtract) for shift in (0, 8, 4, 12))
        return Expansion(asm, (128.0,) * 4, (1.0,) * 4)
    low, high = ("0x000F000F", "0x3C003C00"), ("0x00F000F0", "0x2C002C00")  # masks, and the factors 1 and 1/16
    bits = "0x64006400" if subtract else "0"
    places = ((0, *low), (8, *low), (0, *high), (8, *high))
    asm = tuple(_expand_asm(shift, mask, bits, "f16x2", factor, subtract) for shift, mask, factor in places)
    if subtract:
        return Expansion(asm, (1024.0, 1024.0, 64.0, 64.0), (1.0,) * 4)
    return Expansion(asm, (0.0,) * 4, (2.0**24, 2.0**24, 2.0**20, 2.0**20))


def _expand_asm(shift: int, mask: str, bits: str, kind: str, factor: str, subtract: bool) -> str:
    """PTX: $0 = (($1 >> shift) & mask) | bits, then times `factor` plus the operand $2 where the zero point is subtracted."""
    masked = f"shr.b32 t, $1, {shift}; lop3.b32 t, t, {mask}, {bits}, 0xEA;"
    if not subtract:
        return f"{{.reg .b32 t; {masked} mov.b32 $0, t;}}"
    return f"{{.reg .b32 t, f; {masked} mov.b32 f, {factor}; fma.rn.{kind} $0, t, f, $2;}}"
