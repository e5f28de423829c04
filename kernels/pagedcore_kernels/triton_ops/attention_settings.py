"""Launch settings of the attention kernels: pure functions of what the host knows, with values measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import triton

from pagedcore_kernels.triton_ops.attention_common import Card

MIN_DOT_ROWS = 16
MAX_SPLITS = 128
MAX_PREFIX_PARTS = 32
MAX_PROGRAMS = 6
"""Decode programs of a multiprocessor up to which contexts are split."""
MAX_STORED_IN_ORDER = 16
"""Sequences whose results are stored in another order as they come; for more, a launch that reorders them is faster."""
PROGRAMS_AT_ONCE = 3
"""Decode programs with tiles of 64 keys that a multiprocessor holds at least."""
MIN_TILES_PER_PREFIX_PART = 2
SHARE_UNIT = 32
"""A split's share of a context is a multiple of so many keys: less than a tile, so that short contexts are shared out too."""
RESERVED_SHARED_BYTES = 12 * 1024
"""For what is in shared memory beside tiles: the query, the weights, table entries."""
SMALL_SUMS_SHARED_BYTES = 8 * 1024
"""The same, of up to 16 query heads of up to 128 elements, beside tiles of 64 keys."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Keys of a tile, how tiles are worked through (see `tiles_in_flight`), and how many programs share a context."""

    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int
    prefetch: bool = False
    """Ask for each program's first tile before the kernel before has ended; pays where all programs start at once."""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What the settings of a decode call depend on."""

    num_sequences: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    max_seq_len: int
    """The longest context that a program may meet: the window, where there is one."""

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.num_kv_heads

    @property
    def has_small_sums(self) -> bool:
        """Whether two warps hold what a group of query heads sums up."""
        return self.head_dim <= 128 and self.num_heads <= MIN_DOT_ROWS * self.num_kv_heads

    @property
    def row_bytes(self) -> int:
        """Shared memory of a key and its value."""
        return 2 * triton.next_power_of_2(self.head_dim) * self.element_bytes


def choose_decode_config(shape: DecodeShape, card: Card) -> DecodeConfig:
    """On cards with less shared memory, tiles in flight and then tiles shrink to what fits. Every split has work at the longest context."""
    config, programs_per_multiprocessor = _measured_tile(shape, card)
    config = shrink_to_shared(config, shape.row_bytes, card.shared_bytes)
    num_programs = programs_per_multiprocessor * card.num_multiprocessors
    most_splits = min(MAX_SPLITS, triton.cdiv(shape.max_seq_len, config.block_n))
    num_splits = max(1, min(num_programs // shape.num_rows, most_splits))
    num_splits = max(1, triton.cdiv(shape.max_seq_len, share_of_split(shape.max_seq_len, num_splits)))
    starts_at_once = num_splits * shape.num_rows <= PROGRAMS_AT_ONCE * card.num_multiprocessors
    return replace(config, num_splits=num_splits, prefetch=starts_at_once and card.has_dependent_launch)


def share_of_split(num_keys: int, num_splits: int) -> int:
    """Keys of each split of a context, the last one's apart."""
    return max(1, triton.cdiv(triton.cdiv(num_keys, num_splits), SHARE_UNIT)) * SHARE_UNIT


def shrink_to_shared(config: DecodeConfig, row_bytes: int, shared_bytes: int) -> DecodeConfig:
    """Fewer stages, then fewer keys a tile, until the tiles in flight fit; `row_bytes` are those of a key and its value."""
    block_n, num_stages = config.block_n, config.num_stages
    while num_stages > 3 and block_n * row_bytes * tiles_in_flight(num_stages) > shared_bytes - RESERVED_SHARED_BYTES:
        num_stages -= 2
    while block_n > MIN_DOT_ROWS and block_n * row_bytes > shared_bytes - RESERVED_SHARED_BYTES:
        block_n //= 2
    return replace(config, block_n=block_n, num_stages=num_stages)


def tiles_in_flight(num_stages: int) -> int:
    """Tiles that Triton keeps in shared memory: keys are found through the block table, and that load takes every second stage."""
    return max(1, (num_stages - 1) // 2)


def _measured_tile(shape: DecodeShape, card: Card) -> tuple[DecodeConfig, int]:
    """A tile for rows of 128 elements of 16 bits, and for how many programs a multiprocessor contexts are split; the splits come later.

    With two tiles in flight (five stages) a program reads on while it multiplies; with one, programs that run at once do that for one
    another. Up to a row a multiprocessor, of up to 8,192 keys, large tiles in flight and one program there are fastest; above, as many
    small ones in flight as run at once, if that leaves few places free.
    """
    rows, is_short = shape.num_rows / card.num_multiprocessors, shape.max_seq_len <= 8192
    if shape.element_bytes > 2:
        return DecodeConfig(32, 4, 3, 1), 3  # larger tiles of float32 do not stay in the registers
    has_room_for_large, has_room_for_small = _has_room(1, 128, shape, card), _has_room(PROGRAMS_AT_ONCE, 64, shape, card)
    if rows <= 1 and is_short and has_room_for_large:
        return DecodeConfig(128, 4, 5, 1), 1
    if has_room_for_small and ((1 < rows <= 1.5 and is_short) or 2 < rows <= PROGRAMS_AT_ONCE or rows > 4):
        return DecodeConfig(64, 2, 5, 1), PROGRAMS_AT_ONCE
    if shape.num_heads == shape.num_kv_heads and shape.max_seq_len > 1024:
        takes_small = has_room_for_small and rows <= 2 and is_short
        return (DecodeConfig(64, 2, 5, 1), MAX_PROGRAMS) if takes_small else (DecodeConfig(64, 4, 3, 1), 4)
    if rows <= 1:
        return DecodeConfig(64, 4, 5, 1), 1 if shape.max_seq_len <= 512 else 2
    if rows <= 2 and not is_short:
        return DecodeConfig(128, 4, 3, 1), 3
    if rows <= 2 and not (shape.has_small_sums and shape.num_heads <= 2 * shape.num_kv_heads):
        return DecodeConfig(64, 8, 5, 1), 3
    return DecodeConfig(64, 2 if shape.has_small_sums else 4, 3, 1), 4 if rows <= 2 else 3


def _has_room(num_programs: int, block_n: int, shape: DecodeShape, card: Card) -> bool:
    """Whether a multiprocessor holds so many programs with two tiles of so many keys in flight, and each the sums of its queries."""
    program_bytes = tiles_in_flight(5) * block_n * shape.row_bytes + SMALL_SUMS_SHARED_BYTES
    return shape.has_small_sums and num_programs * program_bytes <= card.shared_bytes


def merged_slice(num_sequences: int, head_dim: int) -> int:
    """Elements of a head that one program merges: few rows are cut into slices so that there are programs enough."""
    return min(32 if num_sequences < 64 else 128, triton.next_power_of_2(head_dim))


def decodes_to_warm(shape: DecodeShape, card: Card) -> list[tuple[int, int]]:
    """Numbers of sequences, up to the shape's, and longest contexts, up to its own, with which every decode kernel is compiled.

    Calls differ in their tile and in whether a context is split; merging them, in the number of parts and in the slice. What stores
    results, merging or the attention of whole contexts, may put those of few sequences in another order, and not those of many. Each is
    met with the shortest context that needs it, so that a sliding window which needs it does not hide it. Once there are many, more than
    programs for which a context is split, nothing changes with their number.
    """
    met: dict[tuple[object, ...], tuple[int, int]] = {}
    last_split = MAX_PROGRAMS * card.num_multiprocessors // shape.num_kv_heads
    num_rows = min(shape.num_sequences, max(last_split, MAX_STORED_IN_ORDER) + 1)
    powers = [1 << exponent for exponent in range(5, max(6, shape.max_seq_len.bit_length()))]
    lengths = {length for power in powers for length in (power, power + 1, power + power // 8, power + power // 4)}
    contexts = {min(length, shape.max_seq_len) for length in lengths} | {shape.max_seq_len}
    for context, num_sequences in product(sorted(contexts), range(1, num_rows + 1)):
        config = choose_decode_config(replace(shape, num_sequences=num_sequences, max_seq_len=context), card)
        are_few = num_sequences <= MAX_STORED_IN_ORDER
        met.setdefault((are_few, config.num_splits > 1, replace(config, num_splits=1)), (num_sequences, context))
        if config.num_splits > 1:
            parts = triton.next_power_of_2(config.num_splits)
            met.setdefault((are_few, parts, merged_slice(num_sequences, shape.head_dim)), (num_sequences, context))
    return list(dict.fromkeys(met.values()))


def decode_workspace_size(num_sequences: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """float32 elements that the parts of split contexts take: a row of values and a log-sum each."""
    return num_sequences * num_heads * num_splits * (head_dim + 1) if num_splits > 1 else 0


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Rows of a tile (query tokens times the heads of a group), keys of a tile, and how tiles are worked through."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What the settings of a prefill call depend on."""

    group_size: int
    head_dim: int
    element_bytes: int
    max_query_len: int


def choose_prefill_config(shape: PrefillShape, card: Card) -> PrefillConfig:
    """The widest tile that the queries fill and that neither spills registers nor exceeds the card's shared memory."""
    if shape.element_bytes > 2:
        most_rows, block_n = 16, 16
    elif card.capability >= 90:
        most_rows, block_n = 128, 128 if shape.head_dim <= 128 else 32
    else:
        most_rows, block_n = 128 if shape.head_dim <= 128 else 64, 32
    rows = min(most_rows, shape.max_query_len * shape.group_size)
    block_m = max(MIN_DOT_ROWS, triton.next_power_of_2(max(shape.group_size, rows)))
    if block_m < 64:
        block_n = min(block_n, 64)
    is_wide = block_m >= 128 or (block_m >= 64 and shape.head_dim > 128)
    return PrefillConfig(block_m, block_n, 8 if is_wide else 4, 3)


@dataclass(frozen=True, slots=True)
class PrefixConfig:
    """The tile of a shared prefix, and how many programs share its keys."""

    tile: PrefillConfig
    num_parts: int


def choose_prefix_config(shape: PrefillShape, num_kv_heads: int, max_prefix_len: int, card: Card) -> PrefixConfig:
    """Parts until each multiprocessor has a program, as long as each part has keys enough; `shape.max_query_len` counts sequences."""
    tile = choose_prefill_config(shape, card)
    num_programs = num_kv_heads * triton.cdiv(shape.max_query_len, tile.block_m // shape.group_size)
    most_parts = min(MAX_PREFIX_PARTS, max_prefix_len // (MIN_TILES_PER_PREFIX_PART * tile.block_n))
    return PrefixConfig(tile, max(1, min(card.num_multiprocessors // num_programs, most_parts)))


def num_query_tiles(num_tokens: int, num_sequences: int, max_query_len: int, tile_tokens: int) -> int:
    """Programs that cover every tile of every sequence, whatever their lengths: sequence i starts at tile start_i // tile + i."""
    return min(num_tokens, num_sequences * max_query_len) // tile_tokens + num_sequences
