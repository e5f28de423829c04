"""Matrices quantized by rounding and stored as compressed-tensors stores them, packed through one long bit string a row."""

from __future__ import annotations

import random
from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor

Rows = list[list[int]]


def write_compressed_tensors(
    tensors: MutableMapping[str, Tensor],
    name: str,
    weight: Tensor,
    *,
    bits: int,
    group_size: int,
    symmetric: bool = True,
    act_order: bool = False,
    packed_zero_points: bool = True,
    seed: int = 0,
) -> Tensor:
    """Add the tensors of module `name`, weight [out, in], to `tensors`; return the matrix that they mean, [out, in] float32.

    group_size -1 is one scale a channel. With act_order the groups run over a shuffled order of the inputs, and `weight_g_idx` says
    which; packed_zero_points=False stores them as older tools did.
    """
    out_features, in_features = weight.shape
    group_size = in_features if group_size == -1 else group_size
    group_of_input = _groups(in_features, group_size, seed if act_order else None)
    codes, zeros, scales = quantize(weight, group_of_input, bits=bits, symmetric=symmetric)
    offset = 2 ** (bits - 1)
    tensors[f"{name}.weight_packed"] = torch.tensor([pack_bits([code + offset for code in row], bits) for row in codes], dtype=torch.int32)
    tensors[f"{name}.weight_scale"] = scales
    tensors[f"{name}.weight_shape"] = torch.tensor([out_features, in_features])
    if act_order:
        tensors[f"{name}.weight_g_idx"] = torch.tensor(group_of_input, dtype=torch.int32)
    if not symmetric:
        tensors[f"{name}.weight_zero_point"] = pack_columns(zeros, bits) if packed_zero_points else torch.tensor(zeros, dtype=torch.int8)
    return dequantize(codes, zeros, scales, group_of_input)


def quantize(weight: Tensor, group_of_input: Sequence[int], *, bits: int, symmetric: bool) -> tuple[Rows, Rows, Tensor]:
    """Codes [out, in] and zeros [out, groups], both signed, and scales [out, groups] bfloat16, of the nearest integers."""
    groups = torch.tensor(group_of_input)
    parts = [weight.float()[:, groups == group] for group in range(max(group_of_input) + 1)]
    low = torch.stack([part.amin(1) for part in parts], 1).clamp(max=0.0)
    high = torch.stack([part.amax(1) for part in parts], 1).clamp(min=0.0)
    middle, last = 2 ** (bits - 1), 2**bits - 1
    span = torch.maximum(high, -low) * 2 if symmetric else high - low
    scales = (span / last).clamp(min=1e-4).bfloat16()
    zeros = torch.zeros_like(low) if symmetric else ((-low / scales.float()).round() - middle).clamp(-middle, middle - 1)
    codes = ((weight.float() / scales.float()[:, groups]).round() + zeros[:, groups]).clamp(-middle, middle - 1)
    return codes.int().tolist(), zeros.int().tolist(), scales


def dequantize(codes: Rows, zeros: Rows, scales: Tensor, group_of_input: Sequence[int]) -> Tensor:
    """[out, in] float32."""
    differences = [
        [code - row_zeros[group] for code, group in zip(row, group_of_input, strict=True)]
        for row, row_zeros in zip(codes, zeros, strict=True)
    ]
    return torch.tensor(differences, dtype=torch.float32) * scales.float()[:, torch.tensor(group_of_input)]


def pack_columns(rows: Rows, bits: int) -> Tensor:
    """Signed integers [out, groups] as int32 words [words of out, groups]."""
    offset = 2 ** (bits - 1)
    columns = [pack_bits([value + offset for value in column], bits) for column in zip(*rows, strict=True)]
    return torch.tensor([list(words) for words in zip(*columns, strict=True)], dtype=torch.int32)


def pack_bits(values: Sequence[int], bits: int) -> list[int]:
    """Words of 32 bits, read from the right end of the string of all values' digits, the first value rightmost."""
    digits = "".join(format(value, f"0{bits}b") for value in reversed(values))
    digits = digits.zfill(-(-len(digits) // 32) * 32)
    words = [int(digits[end - 32 : end], 2) for end in range(len(digits), 0, -32)]
    return [word - 2**32 if word >= 2**31 else word for word in words]


def _groups(in_features: int, group_size: int, seed: int | None) -> list[int]:
    order = list(range(in_features))
    if seed is not None:
        random.Random(seed).shuffle(order)
    groups = [0] * in_features
    for place, index in enumerate(order):
        groups[index] = place // group_size
    return groups
