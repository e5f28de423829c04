"""A plain, slow writer and reader of GPTQ matrices, which shares no code with the product: all integers go through one string of bits."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

_WORD_BITS = 32


def write_gptq(
    tensors: dict[str, Tensor],
    name: str,
    weight: Tensor,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    version: int = 1,
    act_order: bool = False,
    g_idx: Literal["present", "missing", "zero"] = "present",
    seed: int = 0,
) -> Tensor:
    """Round `weight` [out, in] to integers and add its packed tensors to `tensors`; the exact dequantized weight, float32.

    `version` 1 stores zero points minus one, 2 as they are. With `act_order` inputs are of groups in a random order.
    """
    assert g_idx == "present" or not act_order, "without g_idx the order is lost"
    in_features = weight.shape[1]
    size = in_features if group_size == -1 else group_size
    assert in_features % size == 0, "groups of one size"
    groups = np.arange(in_features) // size
    if act_order:
        groups = np.random.default_rng(seed).permutation(groups)
    codes, zeros, scales = quantize(weight.float().numpy(), groups, bits, symmetric=symmetric)
    stored = pack_matrix(codes, zeros, scales, bits=bits, version=version)
    if g_idx != "missing":
        stored["g_idx"] = torch.from_numpy(groups if g_idx == "present" else np.zeros_like(groups)).int()
    tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in stored.items()}
    return dequantize(codes, zeros, scales, groups)


def quantize(weight: np.ndarray, groups: np.ndarray, bits: int, *, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nearest codes [out, in]; zeros and float16 scales [out, groups]."""
    top, middle, num_groups = 2**bits - 1, 2 ** (bits - 1), int(groups.max()) + 1
    codes = np.zeros(weight.shape, np.int64)
    zeros = np.full((len(weight), num_groups), middle, np.int64)
    scales = np.zeros((len(weight), num_groups), np.float16)
    for group in range(num_groups):
        part = weight[:, groups == group]
        if symmetric:
            scale = 2 * np.abs(part).max(axis=1) / top
        else:
            scale = (part.max(axis=1).clip(min=0) - part.min(axis=1).clip(max=0)) / top
        scale = scale.clip(min=1e-4).astype(np.float16)
        if not symmetric:
            zeros[:, group] = np.rint(-part.min(axis=1).clip(max=0) / scale).clip(0, top)
        codes[:, groups == group] = np.rint(part / scale[:, None] + zeros[:, group, None]).clip(0, top)
        scales[:, group] = scale
    return codes, zeros, scales


def pack_matrix(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, *, bits: int, version: int) -> dict[str, Tensor]:
    """qweight, qzeros and scales of codes [out, in], zeros and scales [out, groups]."""
    return {
        "qweight": torch.tensor([pack(row.tolist(), bits) for row in codes], dtype=torch.int32).T.contiguous(),
        "qzeros": pack_zeros(zeros, bits, version),
        "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
    }


def pack_zeros(zeros: np.ndarray, bits: int, version: int) -> Tensor:
    """qzeros of zeros [out, groups]. Version 1 takes one from each 3-bit integer, and else 0x11..1 from each word, with borrow."""
    if version == 2:
        rows = [pack(row.tolist(), bits) for row in zeros.T]
    elif bits == 3:
        rows = [pack([(zero - 1) % 8 for zero in row.tolist()], bits) for row in zeros.T]
    else:
        ones = pack([1] * (_WORD_BITS // bits), bits)[0]
        rows = [[_signed(word - ones) for word in pack(row.tolist(), bits)] for row in zeros.T]
    return torch.tensor(rows, dtype=torch.int32)


def pack(values: list[int], bits: int) -> list[int]:
    """Signed 32-bit words of a string of bits, the first value lowest; the last word is filled with zeros."""
    digits = "".join(f"{value:0{bits}b}" for value in reversed(values))
    digits = digits.zfill(-(-len(digits) // _WORD_BITS) * _WORD_BITS)
    return [_signed(int(digits[end - _WORD_BITS : end], 2)) for end in range(len(digits), 0, -_WORD_BITS)]


def dequantize(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> Tensor:
    """[out, in] float32, one input after another."""
    weight = np.zeros(codes.shape, np.float32)
    for i, group in enumerate(groups):
        weight[:, i] = (codes[:, i] - zeros[:, group]).astype(np.float32) * scales[:, group].astype(np.float32)
    return torch.from_numpy(weight)


def _signed(word: int) -> int:
    word %= 1 << _WORD_BITS
    return word - (1 << _WORD_BITS) if word >> (_WORD_BITS - 1) else word
