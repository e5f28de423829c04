"""Integers come out of 32-bit words lowest bits first, along either dimension, across words and whatever the sign bit says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedcore.quant.bit_packing import num_words, unpack_bits
from support.gptq_writer import pack


def words_of(*hexadecimal: int) -> Tensor:
    return torch.tensor([word - (1 << 32) if word >> 31 else word for word in hexadecimal], dtype=torch.int32)


@pytest.mark.parametrize(
    ("bits", "words", "expected"),
    [
        (2, [0xE4E4E4E4], [0, 1, 2, 3] * 4),
        (2, [0x80000001, 0x40000002], [1, *[0] * 14, 2, 2, *[0] * 14, 1]),
        # Eight octal digits 76543210 are 0xFAC688: four times that, cut into words.
        (3, [0x88FAC688, 0xC688FAC6, 0xFAC688FA], list(range(8)) * 4),
        # Integers 10 and 21 lie across words: bits 30 to 32 and 63 to 65.
        (3, [0xC0000000, 0x80000001, 0x00000003], [*[0] * 10, 7, *[0] * 10, 7, *[0] * 10]),
        (4, [0x87654321, 0x0FEDCBA9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0]),
        (8, [0xFF804001, 0x000000FE], [0x01, 0x40, 0x80, 0xFF, 0xFE, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_known_words(bits: int, words: list[int], expected: list[int], dim: int) -> None:
    packed = words_of(*words).unsqueeze(1 - dim)
    values = unpack_bits(packed, bits, len(expected), dim=dim)
    assert values.dtype == torch.uint8
    assert values.shape == ((len(expected), 1) if dim == 0 else (1, len(expected)))
    assert values.flatten().tolist() == expected


@pytest.mark.parametrize(
    ("count", "bits", "expected"), [(0, 4, 0), (1, 2, 1), (16, 2, 1), (17, 2, 2), (32, 3, 3), (33, 3, 4), (20, 4, 3), (5, 8, 2)]
)
def test_the_last_word_need_not_be_full(count: int, bits: int, expected: int) -> None:
    assert num_words(count, bits) == expected


def test_integers_beyond_the_count_are_not_read() -> None:
    assert unpack_bits(words_of(0xFFFFFF21), 4, 2, dim=0).tolist() == [1, 2]


@given(st.integers(1, 8).flatmap(lambda bits: st.tuples(st.just(bits), st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=80))))
def test_what_was_packed_comes_out(drawn: tuple[int, list[int]]) -> None:
    bits, values = drawn
    words = pack(values, bits)
    assert len(words) == num_words(len(values), bits)
    assert unpack_bits(torch.tensor(words, dtype=torch.int32), bits, len(values), dim=0).tolist() == values


def test_rows_and_columns_are_packed_alike() -> None:
    values = torch.randint(0, 8, (45, 7), generator=torch.Generator().manual_seed(0))
    words = torch.tensor([pack(column, 3) for column in values.T.tolist()], dtype=torch.int32)
    assert torch.equal(unpack_bits(words.T, 3, 45, dim=0), values)
    assert torch.equal(unpack_bits(words, 3, 45, dim=1), values.T)
