"""Integers of a few bits, stored one after another in 32-bit words."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def num_words(count: int, bits: int) -> int:
    """32-bit words that hold `count` integers of `bits` bits each."""
    return -(-count * bits // WORD_BITS)


def unpack_bits(words: Tensor, bits: int, count: int, *, dim: int) -> Tensor:
    """The first `count` integers of `bits` (1 to 8) bits along `dim` of int32 words, as uint8; lowest bits first, also across words.

    words is [..., num_words(count, bits), ...] along `dim`; the result has `count` there. A word's sign bit is a bit like others.
    """
    words = words.movedim(dim, -1)
    first_bit = torch.arange(count, device=words.device) * bits
    index, shift = first_bit // WORD_BITS, first_bit % WORD_BITS
    values = words.index_select(-1, index).bitwise_right_shift_(shift.int())
    if WORD_BITS % bits:
        values = _with_the_next_word(values, words, index, shift, bits)
    return values.bitwise_and_((1 << bits) - 1).to(torch.uint8).movedim(-1, dim)


def _with_the_next_word(values: Tensor, words: Tensor, index: Tensor, shift: Tensor, bits: int) -> Tensor:
    """Replace the high bits of integers that continue in the following word."""
    crosses = shift + bits > WORD_BITS
    following = words.index_select(-1, (index + 1).clamp(max=words.shape[-1] - 1))
    num_low = (WORD_BITS - shift).int().where(crosses, 0)
    joined = (values & ((1 << num_low) - 1)) | (following << num_low)
    return joined.where(crosses, values)
