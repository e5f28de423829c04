"""Zero points of GPTQ files and the ways in which files store them."""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import Tensor

from pagedcore.quant.bit_packing import WORD_BITS, unpack_bits

_WORD_RANGE = 1 << WORD_BITS


class ZeroStorage(Enum):
    """What stands in qzeros for zero points z. The value is how messages call it."""

    MINUS_ONE = "gptq (zero minus one)"
    """z - 1. For 2, 4 and 8 bits each 32-bit word was lowered as one number: a z of 0 borrows from its neighbour."""
    AS_IS = "gptq_v2 (the zero itself)"
    SHIFTED_3_BIT = "3-bit gptq as GPTQModel before 7.0 wrote it"
    """z, then each word lowered by a pattern of ones whose words stand in reverse order: other bits than the lowest of each z."""


def candidates(label: ZeroStorage, bits: int) -> list[ZeroStorage]:
    """Every storage that occurs with `bits`, the one that the file names first."""
    of_bits = [storage for storage in ZeroStorage if bits == 3 or storage is not ZeroStorage.SHIFTED_3_BIT]
    return [label, *(storage for storage in of_bits if storage is not label)]


def unpack_zeros(words: Tensor, bits: int, count: int, storage: ZeroStorage) -> Tensor:
    """[groups, num_words(count, bits)] int32 -> [groups, count] uint8."""
    if storage is ZeroStorage.MINUS_ONE and WORD_BITS % bits:
        return (unpack_bits(words, bits, count, dim=1) + 1) & ((1 << bits) - 1)
    return unpack_bits(words + _repeat(_subtracted(bits, storage), words.shape[1], words.device), bits, count, dim=1)


def uniform_zeros(zero: int, bits: int, num_words: int, storage: ZeroStorage, device: torch.device) -> Tensor:
    """[num_words] int32: the words that `unpack_zeros` reads as `zero` in each place."""
    if storage is ZeroStorage.MINUS_ONE:
        return _repeat(_one_period(zero - 1, bits), num_words, device)
    return _repeat(_one_period(zero, bits), num_words, device) - _repeat(_subtracted(bits, storage), num_words, device)


def _subtracted(bits: int, storage: ZeroStorage) -> list[int]:
    """One period of what a writer took from the words of z."""
    if storage is ZeroStorage.AS_IS:
        return [0]
    ones = _one_period(1, bits)
    return ones[::-1] if storage is ZeroStorage.SHIFTED_3_BIT else ones


def _one_period(value: int, bits: int) -> list[int]:
    """Words that hold `value` in each place, until their pattern repeats."""
    num_words = bits // math.gcd(bits, WORD_BITS)
    stream = sum(value << first_bit for first_bit in range(0, num_words * WORD_BITS, bits))
    return [(stream >> first_bit) % _WORD_RANGE for first_bit in range(0, num_words * WORD_BITS, WORD_BITS)]


def _repeat(period: list[int], num_words: int, device: torch.device) -> Tensor:
    """[num_words] int32."""
    words = torch.tensor(period, dtype=torch.int64, device=device).repeat(-(-num_words // len(period)))[:num_words]
    return words.where(words < _WORD_RANGE // 2, words - _WORD_RANGE).to(torch.int32)
