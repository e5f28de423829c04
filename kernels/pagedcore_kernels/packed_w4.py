"""4-bit weights in the order in which the product reads them: packed once at load, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_ROWS = 64
"""Outputs of one contiguous tile."""
_ROW_MULTIPLE = 128
_SLICE_OF_NIBBLE = (0, 2, 1, 3)


@dataclass(frozen=True, slots=True)
class PackedW4:
    """W[n, k] = (code - zero) * scale in tiles of 64 outputs by one block of inputs, each tile contiguous.

    A block is 4 slices of `slice_size` inputs. Word j of a row holds input j of each slice: slice 0 in its lowest four bits,
    then slices 2, 1 and 3. So a word of 16 bits, masked, is one weight of each slice with nothing to reorder.
    """

    words: Tensor  # [padded N / 64, padded K / (4 slice_size), 64, slice_size] int16
    scales: Tensor  # [groups of padded K, padded N] float32; the low 8 bits are the zero point where `uniform_zero` is None
    out_features: int
    in_features: int
    group_size: int
    """Inputs of a group; a multiple of `slice_size`, or `in_features` for one group."""
    uniform_zero: int | None
    """The zero point of all groups; None where they differ."""

    @property
    def slice_size(self) -> int:
        return self.words.shape[3]

    @property
    def num_blocks(self) -> int:
        return self.words.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.words.numel() * self.words.element_size() + self.scales.numel() * self.scales.element_size()


def pack_w4(codes: Tensor, scales: Tensor, zeros: Tensor, *, group_size: int | None = None) -> PackedW4:
    """Pack codes [N, K] uint8 below 16 with scales [N, G] float32 and zeros [N, G] uint8; `group_size` is K / G unless given.

    Scales keep all their bits where every zero point is the same; else they are rounded to 16 significant bits, which changes
    none that was float16 or bfloat16. Raises ValueError for shapes and groups that the layout cannot hold.
    """
    out_features, in_features = codes.shape
    size = _checked_group_size(codes, scales, zeros, group_size)
    num_groups = scales.shape[1]
    slice_size = 32 if num_groups > 1 and size % 64 else 64
    uniform_zero = _uniform_value(zeros)
    packed_scales = scales.float() if uniform_zero is not None else _with_zeros(scales.float(), zeros)
    words = _pack_words(_pad(codes, _ROW_MULTIPLE, 4 * slice_size), slice_size)
    groups_of_words = -(-words.shape[1] * 4 * slice_size // size) if num_groups > 1 else 1
    return PackedW4(
        words=words,
        scales=_pad(packed_scales, _ROW_MULTIPLE, groups_of_words).t().contiguous(),
        out_features=out_features,
        in_features=in_features,
        group_size=size,
        uniform_zero=uniform_zero,
    )


def unpack_w4(packed: PackedW4) -> tuple[Tensor, Tensor, Tensor]:
    """codes [N, K] uint8, scales [N, G] float32 and zeros [N, G] uint8, as they were packed."""
    tiles = torch.stack([(packed.words >> (4 * nibble)) & 15 for nibble in _SLICE_OF_NIBBLE], dim=3)  # [tile, block, row, slice, word]
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
    if num_groups > 1 and size % 32:
        raise ValueError(f"4-bit weights are packed in groups of a multiple of 32 inputs, or one group; the group size is {size}")
    return size


def _uniform_value(zeros: Tensor) -> int | None:
    first = zeros.flatten()[0]
    return int(first) if bool((zeros == first).all()) else None


def _with_zeros(scales: Tensor, zeros: Tensor) -> Tensor:
    """The zero point in the low 8 bits of the float, which is rounded to the nearest that leaves them clear."""
    bits = scales.contiguous().view(torch.int32)
    return (((bits + 0x80) & ~0xFF) | zeros.int()).view(torch.float32)


def _pad(matrix: Tensor, row_multiple: int, column_multiple: int) -> Tensor:
    rows, columns = matrix.shape
    return F.pad(matrix, (0, -columns % column_multiple, 0, -rows % row_multiple))


def _pack_words(codes: Tensor, slice_size: int) -> Tensor:
    rows, columns = codes.shape
    num_blocks = columns // (4 * slice_size)
    slices = codes.view(rows // TILE_ROWS, TILE_ROWS, num_blocks, 4, slice_size).transpose(1, 2)  # [tile, block, row, slice, word]
    words = torch.zeros(slices.shape[0], num_blocks, TILE_ROWS, slice_size, dtype=torch.int16, device=codes.device)
    for index, nibble in enumerate(_SLICE_OF_NIBBLE):
        words |= slices[..., index, :].to(torch.int16) << (4 * nibble)
    return words
