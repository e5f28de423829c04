"""Matrices quantized by rounding and stored as AWQ checkpoints store them, packed one integer at a time."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)
WORDS_OF_ZEROS_PER_STEP = {32: 4, 64: 2, 128: 1, 256: 1}
Rows = list[list[int]]


def write_awq(
    tensors: MutableMapping[str, Tensor], name: str, weight: Tensor, *, group_size: int, version: str = "gemm", zero_point: bool = True
) -> Tensor:
    """Add the tensors of module `name`, weight [out, in], to `tensors`; return the matrix that they mean, [out, in] float32.

    group_size -1 is one group of all inputs; without zero_point no `qzeros` are written, and every zero is 8.
    """
    in_features = weight.shape[1]
    group_size = in_features if group_size == -1 else group_size
    codes, zeros, scales = quantize(weight, group_size, zero_point)
    if version == "gemm":
        tensors[f"{name}.qweight"] = pack_rows(_transposed(codes), INTERLEAVED)
        tensors[f"{name}.scales"] = scales.T.contiguous()
        packed_zeros = pack_rows(_transposed(zeros), INTERLEAVED)
    else:
        num_places = 8 * num_gemv_words(in_features // group_size, group_size)
        tensors[f"{name}.qweight"] = pack_rows(codes, IN_ORDER)
        tensors[f"{name}.scales"] = torch.zeros(len(codes), num_places, dtype=scales.dtype)
        tensors[f"{name}.scales"][:, : scales.shape[1]] = scales
        packed_zeros = pack_rows([row + [0] * (num_places - len(row)) for row in zeros], IN_ORDER)
    if zero_point:
        tensors[f"{name}.qzeros"] = packed_zeros
    return dequantize(codes, zeros, scales, group_size)


def quantize(weight: Tensor, group_size: int, zero_point: bool) -> tuple[Rows, Rows, Tensor]:
    """Codes [out, in], zeros [out, groups] and scales [out, groups] float16 of the nearest 4-bit integers."""
    groups = weight.float().reshape(len(weight), -1, group_size)
    low, high = groups.amin(2).clamp(max=0.0), groups.amax(2).clamp(min=0.0)
    span = (high - low) / 15 if zero_point else torch.maximum(high, -low) / 7.5
    scales = span.clamp(min=1e-4).half()
    zeros = (-low / scales.float()).round().clamp(0, 15) if zero_point else torch.full_like(low, 8.0)
    codes = ((groups / scales.float()[:, :, None]).round() + zeros[:, :, None]).clamp(0, 15).flatten(1)
    return codes.int().tolist(), zeros.int().tolist(), scales


def dequantize(codes: Rows, zeros: Rows, scales: Tensor, group_size: int) -> Tensor:
    """[out, in] float32."""
    differences = [
        [code - row_zeros[index // group_size] for index, code in enumerate(row)] for row, row_zeros in zip(codes, zeros, strict=True)
    ]
    return torch.tensor(differences, dtype=torch.float32) * scales.float().repeat_interleave(group_size, 1)


def num_gemv_words(num_groups: int, group_size: int) -> int:
    """Words of a row of zeros: enough for the groups, and a whole number of steps."""
    step, words = WORDS_OF_ZEROS_PER_STEP[group_size], 0
    while words * 8 < num_groups:
        words += step
    return words


def pack_rows(rows: Sequence[Sequence[int]], order: Sequence[int]) -> Tensor:
    """int32 [rows, words]: nibble i of a word, from the lowest, holds the integer at order[i] of the word's eight; 0 beyond the end."""
    return torch.tensor([_pack_row(row, order) for row in rows], dtype=torch.int32)


def _pack_row(row: Sequence[int], order: Sequence[int]) -> list[int]:
    words = []
    for first in range(0, len(row), 8):
        word = 0
        for nibble, place in enumerate(order):
            if first + place < len(row):
                word += row[first + place] * 16**nibble
        words.append(word - 2**32 if word >= 2**31 else word)
    return words


def _transposed(rows: Rows) -> Rows:
    return [list(column) for column in zip(*rows, strict=True)]
