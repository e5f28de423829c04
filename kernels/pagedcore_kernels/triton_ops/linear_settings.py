"""How products with a plain matrix are launched: what was fastest where it was measured, a rule elsewhere."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import triton
from torch import Tensor

from pagedcore_kernels.triton_ops.attention_common import card_of

_PROGRAMS_WANTED = 128


@dataclass(frozen=True, slots=True)
class RowConfig:
    """How one or two rows are multiplied: a program sums `block_n` outputs over tiles of `block_k` inputs, the first requested early."""

    block_n: int
    block_k: int
    num_warps: int = 4
    splits: int = 1

    def holds_whole_rows(self, in_features: int) -> bool:
        """Whether a tile has all inputs of its outputs: only then it multiplies two rows."""
        return self.splits == 1 and self.block_k >= in_features


@dataclass(frozen=True, slots=True)
class DotConfig:
    """How several rows are multiplied on the tensor cores."""

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 4
    splits: int = 1
    prefetched_steps: int = 2
    """Tiles of weights asked for before the wait for the kernel that makes x, where kernels may start early."""


LinearConfig = RowConfig | DotConfig
_ROW, _DOT = RowConfig, DotConfig
_DOT_LATE = DotConfig(64, 128, prefetched_steps=0)
_TWO_SPLITS_LATE = DotConfig(64, 128, splits=2, prefetched_steps=0)
_FOUR_SPLITS_LATE = DotConfig(64, 128, splits=4, prefetched_steps=0)
_THREE_STAGES_LATE = DotConfig(64, 128, num_stages=3, prefetched_steps=0)

# (in, out) -> configurations for 1, 2, up to 16, up to 32 and up to 64 rows on an H200: the fastest in replays of a graph, or others with
# which a whole decode step was faster.
_SM90: dict[tuple[int, int], tuple[LinearConfig, LinearConfig, DotConfig, DotConfig, DotConfig]] = {
    (1024, 4096): (_ROW(8, 1024), _ROW(4, 1024), _DOT(64, 128), _DOT(64, 128), _DOT_LATE),
    (2048, 1024): (_ROW(1, 2048), _ROW(2, 2048), _FOUR_SPLITS_LATE, _FOUR_SPLITS_LATE, _FOUR_SPLITS_LATE),
    (1024, 6144): (_ROW(8, 1024), _ROW(4, 1024), _DOT(64, 128), _DOT(64, 128), _DOT_LATE),
    (3072, 1024): (_ROW(1, 4096, 8), _ROW(2, 4096), _FOUR_SPLITS_LATE, _FOUR_SPLITS_LATE, _FOUR_SPLITS_LATE),
    (1024, 151936): (_ROW(4, 1024, 2), _DOT(64, 128), _DOT(64, 128), _DOT(64, 128), _DOT(64, 128)),
    (4096, 12288): (_ROW(1, 4096, 8), _DOT(64, 128), _DOT_LATE, _DOT_LATE, _DOT_LATE),
    (4096, 4096): (_ROW(1, 4096, 8), _DOT(64, 128, splits=2), _DOT(64, 128, splits=4), _FOUR_SPLITS_LATE, _TWO_SPLITS_LATE),
    (4096, 22016): (_ROW(1, 4096, 8), _DOT(64, 64, 4, 6), _DOT_LATE, _DOT_LATE, _DOT_LATE),
    (11008, 4096): (_ROW(4, 1024), _DOT(64, 128, splits=4), _DOT(64, 128, splits=4), _FOUR_SPLITS_LATE, _TWO_SPLITS_LATE),
    (4096, 32000): (_ROW(1, 4096, 8), _DOT(64, 128), _DOT(64, 128), _DOT(64, 128), _DOT(64, 128)),
    (3584, 4608): (_ROW(4, 512, 2), _DOT_LATE, _DOT_LATE, _DOT_LATE, _DOT_LATE),
    (3584, 3584): (_ROW(1, 4096, 8), _DOT(64, 128, splits=4), _DOT(64, 128, splits=4), _FOUR_SPLITS_LATE, _FOUR_SPLITS_LATE),
    (3584, 37888): (_ROW(2, 4096, 8), _DOT(64, 128, 4, 3), _DOT(64, 128, 4, 3), _THREE_STAGES_LATE, _THREE_STAGES_LATE),
    (18944, 3584): (_ROW(2, 2048), _FOUR_SPLITS_LATE, _TWO_SPLITS_LATE, _FOUR_SPLITS_LATE, _FOUR_SPLITS_LATE),
}  # fmt: skip


# (in, out) -> the most rows up to which these products are taken on an H200 (bfloat16). Of the four matrices of a layer of each shape: as
# many as made a decode step faster, some though slower alone, because they start while the kernel before them ends. Of the two
# heads: as many as took less time than cuBLAS's in replays of a graph.
_TAKEN_UP_TO_SM90 = {
    (1024, 4096): 64,
    (2048, 1024): 64,
    (1024, 6144): 64,
    (3072, 1024): 64,
    (1024, 151936): 32,
    (4096, 12288): 32,
    (4096, 4096): 64,
    (4096, 22016): 16,
    (11008, 4096): 64,
    (4096, 32000): 32,
    (3584, 4608): 16,
    (3584, 3584): 32,
    (3584, 37888): 32,
    (18944, 3584): 32,
}
_NARROW = 4608
"""Outputs up to which a matrix that nobody measured is taken up to 16 rows, as most of the narrow ones above; one row is always taken."""


def takes_skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether a step multiplies x [M, K] and weight [N, K] by `skinny_linear`: 16-bit on Hopper, where that was measured."""
    num_rows, (out_features, in_features) = x.shape[0], weight.shape
    if x.element_size() != 2 or not weight.is_contiguous() or not x.is_contiguous() or card_of(x.device).capability != 90:
        return False
    limit = _TAKEN_UP_TO_SM90.get((in_features, out_features), 16 if out_features <= _NARROW else 1)
    return 0 < num_rows <= limit


def choose_config(num_rows: int, out_features: int, in_features: int, *, capability: int, itemsize: int = 2) -> LinearConfig:
    """The configuration for a product of `num_rows` rows on a GPU of `capability`, such as 90: from measurements where there are some."""
    if itemsize == 2 and capability == 90 and (in_features, out_features) in _SM90:
        return _SM90[in_features, out_features][row_bucket(num_rows)]
    if num_rows == 1:
        return _default_row_config(in_features)
    if itemsize == 4:
        return DotConfig(32, 32, 4, 2, _default_splits(out_features // 32, in_features // 32))
    # Rows of an odd length cannot be copied in vectors: their tiles pass through registers.
    block_k = 32 if in_features % 8 else 128 if capability in (80, 90) else 64
    block_k = min(block_k, max(16, triton.next_power_of_2(in_features)))
    splits = _default_splits(out_features // 64, in_features // block_k)
    if capability == 90 and block_k == 128:
        return DotConfig(64, 128, 4, 4, splits, prefetched_steps=0)
    return DotConfig(64, block_k, 4, 3, splits)


def row_bucket(num_rows: int) -> int:
    """Column of a table of configurations: 1, 2, up to 16, up to 32, up to 64 rows."""
    return bisect_left((1, 2, 16, 32), num_rows)


def _default_row_config(in_features: int) -> RowConfig:
    whole = triton.next_power_of_2(in_features)
    if whole <= 4096 and whole <= in_features * 4 // 3:
        return RowConfig(max(1, 4096 // whole), whole, 8 if whole == 4096 else 4)
    return RowConfig(2, 2048) if whole > 2048 else RowConfig(4, min(1024, whole))


def _default_splits(num_tiles: int, num_steps: int) -> int:
    """Enough programs to fill a card, each with at least four steps."""
    splits = 1
    while splits < 8 and num_tiles * splits < _PROGRAMS_WANTED and num_steps >= 8 * splits:
        splits *= 2
    return splits
