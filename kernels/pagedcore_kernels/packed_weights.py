"""4-bit and 8-bit weights in the order in which the products read them: packed once at load, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BITS = (4, 8)
TILE_ROWS = 64
"""Outputs of one contiguous tile."""
MAX_SCALES = 2**31 - 1
"""Of one matrix: the kernels count them in 32 bits."""
_ROW_MULTIPLE = 128
_WORD_BITS = 16
_PLACES = {4: (0, 2, 1, 3), 8: (0, 1)}
"""By bits: the slice whose code stands in each place of a word, from the lowest."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """W[n, k] = (code - zero) * scale in tiles of 64 outputs by one block of inputs, each tile contiguous.

    A block is 16 / bits slices of `slice_size` inputs. Word j of a row holds input j of each slice: of 8-bit codes slice 0 in the
    low byte, of 4-bit codes slice 0 in the lowest four bits, then slices 2, 1 and 3. So a word, masked, is one weight of
    each slice with nothing to reorder.
    """

    words: Tensor  # [padded N / 64, padded K / (slices * slice_size), 64, slice_size] int16
    scales: Tensor  # [groups of padded K, padded N] float32; the low 8 bits are the zero point where `uniform_zero` is None
    out_features: int
    in_features: int
    group_size: int
    """Inputs of a group; a multiple of `slice_size`, or `in_features` for one group."""
    uniform_zero: int | None
    """The zero point of all groups; None where they differ."""
    bits: int = 4

    @property
    def slice_size(self) -> int:
        return self.words.shape[3]

    @property
    def num_slices(self) -> int:
        """Of a block, and codes in a word."""
        return _WORD_BITS // self.bits

    @property
    def block_size(self) -> int:
        """Inputs of a block."""
        return self.num_slices * self.slice_size

    @property
    def num_blocks(self) -> int:
        return self.words.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.words.nbytes + self.scales.nbytes


def pack_weights(codes: Tensor, scales: Tensor, zeros: Tensor, *, bits: int = 4, group_size: int | None = None) -> PackedWeights:
    """Pack codes [N, K] uint8 of `bits` with scales [N, G] float32 and zeros [N, G] uint8; `group_size` is K / G unless given.

    Scales keep all their bits where every zero point is the same; else they are rounded to 16 significant bits, which changes
    none that was float16 or bfloat16. Raises ValueError for bits, shapes, groups and numbers of scales that the layout cannot hold.
    """
    if bits not in BITS:
        raise ValueError(f"weights of 4 and 8 bits are packed, not of {bits}")
    out_features, in_features = codes.shape
    size = _checked_group_size(codes, scales, zeros, group_size)
    num_groups = scales.shape[1]
    slice_size = 32 if num_groups > 1 and size % 64 else 64
    block_size = _WORD_BITS // bits * slice_size
    groups_of_words = -(-_rounded_up(in_features, block_size) // size) if num_groups > 1 else 1
    _check_num_scales(_rounded_up(out_features, _ROW_MULTIPLE), groups_of_words)
    uniform_zero = _uniform_value(zeros)
    packed_scales = scales.float() if uniform_zero is not None else _with_zeros(scales.float(), zeros)
    return PackedWeights(
        words=_pack_words(_pad(codes, _ROW_MULTIPLE, block_size), bits, slice_size),
        scales=_pad(packed_scales, _ROW_MULTIPLE, groups_of_words).t().contiguous(),
        out_features=out_features,
        in_features=in_features,
        group_size=size,
        uniform_zero=uniform_zero,
        bits=bits,
    )


def holds_groups_of(group_size: int) -> bool:
    """Whether a matrix of several groups can be packed whose groups have this many inputs."""
    return group_size % 32 == 0


def unpack_weights(packed: PackedWeights) -> tuple[Tensor, Tensor, Tensor]:
    """codes [N, K] uint8, scales [N, G] float32 and zeros [N, G] uint8, as they were packed."""
    mask = (1 << packed.bits) - 1
    shifts = [packed.bits * _PLACES[packed.bits].index(index) for index in range(packed.num_slices)]
    tiles = torch.stack([(packed.words >> shift) & mask for shift in shifts], dim=3)  # [tile, block, row, slice, word]
    codes = tiles.permute(0, 2, 1, 3, 4).flatten(2).flatten(0, 1)
    codes = codes[: packed.out_features, : packed.in_features].to(torch.uint8)
    num_groups = -(-packed.in_features // packed.group_size)
    scales = packed.scales.t()[: packed.out_features, :num_groups].contiguous()
    if packed.uniform_zero is not None:
        return codes, scales, torch.full_like(scales, packed.uniform_zero, dtype=torch.uint8)
    bits = scales.view(torch.int32)
    return codes, (bits & ~0xFF).view(torch.float32), (bits & 0xFF).to(torch.uint8)


def _checked_group_size(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int | None) -> int:
    out_features, in_features = codes.shape
    num_groups = scales.shape[1]
    if scales.shape != zeros.shape or scales.shape[0] != out_features:
        raise ValueError(f"scales and zeros must both be [{out_features}, groups]: {tuple(scales.shape)} and {tuple(zeros.shape)}")
    size = in_features // num_groups if group_size is None else group_size
    if num_groups != -(-in_features // size):
        raise ValueError(f"{in_features} inputs in groups of {size} are not {num_groups} groups; give group_size")
    if num_groups > 1 and not holds_groups_of(size):
        raise ValueError(f"weights are packed in groups of a multiple of 32 inputs, or one group; the group size is {size}")
    return size


def _check_num_scales(padded_out_features: int, num_groups: int) -> None:
    if padded_out_features * num_groups > MAX_SCALES:
        scales = f"{num_groups} groups of {padded_out_features} outputs have {num_groups * padded_out_features} scales"
        raise ValueError(f"{scales}; a packed matrix has up to {MAX_SCALES}: take larger groups, or leave it unpacked")


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _uniform_value(zeros: Tensor) -> int | None:
    first = zeros.flatten()[0]
    return int(first) if bool((zeros == first).all()) else None


def _with_zeros(scales: Tensor, zeros: Tensor) -> Tensor:
    """The zero point in the low 8 bits of the float, which is rounded to the nearest that leaves them clear."""
    bits = scales.contiguous().view(torch.int32)
    return (((bits + 0x80) & ~0xFF) | zeros.int()).view(torch.float32)


def _pad(matrix: Tensor, row_multiple: int, column_multiple: int) -> Tensor:
    rows, columns = matrix.shape
    padding = (0, -columns % column_multiple, 0, -rows % row_multiple)
    return F.pad(matrix, padding) if any(padding) else matrix


def _pack_words(codes: Tensor, bits: int, slice_size: int) -> Tensor:
    rows, columns = codes.shape
    num_slices = _WORD_BITS // bits
    num_blocks = columns // (num_slices * slice_size)
    slices = codes.reshape(rows // TILE_ROWS, TILE_ROWS, num_blocks, num_slices, slice_size).transpose(
        1, 2
    )  # [tile, block, row, slice, word]
    words = torch.zeros(slices.shape[0], num_blocks, TILE_ROWS, slice_size, dtype=torch.int16, device=codes.device)
    for place, index in enumerate(_PLACES[bits]):
        words |= slices[..., index, :].to(torch.int16).bitwise_left_shift_(bits * place)
    return words
