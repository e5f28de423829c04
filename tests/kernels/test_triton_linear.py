# ruff: noqa: E402
"""Skinny products, plain and 4 bit: interpreted checks, packing, compiled for every card, and the choice of configurations."""

from __future__ import annotations

import re

import pytest
import torch

from pagedcore_kernels.packed_w4 import pack_w4, unpack_w4
from pagedcore_kernels.reference.w4a16_linear import dequantize_w4 as reference_dequantize
from support.linear_problems import random_codes
from support.triton_interpreter import needs_triton, run_interpreted

pytestmark = needs_triton
pytest.importorskip("triton")

from pagedcore_kernels.triton_ops import linear_settings
from pagedcore_kernels.triton_ops import w4a16_linear as w4
from pagedcore_kernels.triton_ops.attention_common import Card
from pagedcore_kernels.triton_ops.linear_settings import DotConfig, RowConfig, choose_config
from pagedcore_kernels.triton_ops.row_linear import norm_row_linear, row_linear, silu_mul_row_linear
from pagedcore_kernels.triton_ops.skinny_linear import skinny_linear
from pagedcore_kernels.triton_ops.split_k import SplitKWorkspace
from pagedcore_kernels.triton_ops.w4_settings import choose_expansion, choose_w4_config
from support.triton_compile import CAPABILITIES, Compiled, compile_op

H200 = Card(90, 132)
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
MAX_STACK_BYTES = 32
"""A few registers of a thread may be spilled where their number is limited so that more programs fit."""
HALF_TYPES = [torch.float16, torch.bfloat16]
ROWS_OF_BUCKET = (1, 16, 32, 64)
# Each configuration of the table once, with a shape that has it.
TABLE = {(row[linear_settings.row_bucket(rows)], rows): shape for shape, row in linear_settings._SM90.items() for rows in ROWS_OF_BUCKET}


def test_kernels_equal_the_reference_under_the_interpreter() -> None:
    run_interpreted("linear.py")


# --- packing ----------------------------------------------------------------------------------------------------------


def test_a_word_holds_one_code_of_each_slice_with_slices_1_and_2_swapped() -> None:
    codes = torch.zeros(1, 256, dtype=torch.uint8)
    codes[0, 3], codes[0, 64 + 3], codes[0, 128 + 3], codes[0, 192 + 3] = 1, 2, 3, 4
    words = pack_w4(codes, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.uint8)).words
    assert words.shape == (2, 1, 64, 64)
    assert words[0, 0, 0, 3].item() == 0x4231
    assert words.count_nonzero() == 1


def test_a_zero_point_of_a_group_stands_in_the_low_bits_of_its_scale() -> None:
    scales, zeros = torch.tensor([[0.5, 0.25]]), torch.tensor([[3, 16]], dtype=torch.uint8)
    packed = pack_w4(torch.zeros(1, 64, dtype=torch.uint8), scales, zeros)
    assert packed.uniform_zero is None
    assert packed.scales[:2, 0].view(torch.int32).tolist() == [0x3F000003, 0x3E800010]


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize(("in_features", "group_size"), [(384, 128), (320, 32), (192, 64), (301, 301), (96, 96)])
def test_packing_loses_nothing(in_features: int, group_size: int, uniform: bool) -> None:
    codes, scales, zeros = random_codes(70, in_features, in_features // group_size, uniform=uniform)
    packed = pack_w4(codes, scales, zeros)
    assert packed.uniform_zero == (8 if uniform else None)
    assert all(torch.equal(was, now) for was, now in zip((codes, scales, zeros), unpack_w4(packed), strict=True))
    expected = (codes.float() - zeros.float().repeat_interleave(group_size, 1)) * scales.repeat_interleave(group_size, 1)
    assert torch.equal(reference_dequantize(packed, torch.float32), expected)


def test_scales_of_one_zero_point_keep_all_their_bits() -> None:
    scales = torch.rand(4, 2)
    codes, zeros = torch.zeros(4, 128, dtype=torch.uint8), torch.full((4, 2), 7, dtype=torch.uint8)
    assert torch.equal(unpack_w4(pack_w4(codes, scales, zeros))[1], scales)


def test_a_last_group_may_be_short_if_the_group_size_is_given() -> None:
    codes, scales, zeros = random_codes(3, 160, 2, uniform=False)
    expected = (codes.float() - zeros.float().repeat_interleave(128, 1)[:, :160]) * scales.repeat_interleave(128, 1)[:, :160]
    assert torch.equal(reference_dequantize(pack_w4(codes, scales, zeros, group_size=128), torch.float32), expected)


@pytest.mark.parametrize(
    ("in_features", "groups", "group_size", "match"),
    [(96, 4, None, "group size is 24"), (160, 2, 64, "not 2 groups"), (100, 3, None, "not 3 groups")],
)
def test_groups_that_the_layout_cannot_hold_are_refused(in_features: int, groups: int, group_size: int | None, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        pack_w4(*random_codes(2, in_features, groups, uniform=True), group_size=group_size)


def test_packed_weights_of_group_128_take_4_bits_and_a_quarter() -> None:
    packed = pack_w4(*random_codes(4096, 1024, 8, uniform=False))
    assert packed.num_bytes == 4096 * 1024 // 2 + 4096 * 8 * 4


# --- expansion of codes -----------------------------------------------------------------------------------------------


def run_expansion(asm: str, word: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The two numbers that the masked word is, and the factor of the instruction after that (1 where there is none), in float64."""
    shift = int(re.search(r"shr.b32 t, \$1, (\d+);", asm)[1])
    mask, bits = (int(value, 0) for value in re.search(r"lop3.b32 t, t, (\w+), (\w+), 0xEA;", asm).groups())
    factor = re.search(r"mov.b32 f, (\w+);", asm)
    numbers = torch.tensor([((word >> shift) & mask) | bits], dtype=torch.int32).view(dtype).double()
    return numbers, torch.tensor([int(factor[1], 0)], dtype=torch.int32).view(dtype).double() if factor else torch.ones(2)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("subtract", [False, True])
def test_the_instructions_make_each_code_the_number_that_the_kernel_takes_it_for(dtype: torch.dtype, subtract: bool) -> None:
    expansion = choose_expansion(dtype, subtract=subtract)
    codes = torch.zeros(1, 256, dtype=torch.uint8)
    for first in range(16):
        codes[0] = (torch.arange(256) * 7 + first) % 16
        words = pack_w4(codes, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.uint8)).words[0, 0, 0]
        pair = int(words[:2].view(torch.int32).item()) & 0xFFFFFFFF
        for slice_index, asm in enumerate(expansion.asm):
            expected = codes[0, 64 * slice_index : 64 * slice_index + 2].double()
            numbers, factor = run_expansion(asm, pair, dtype)
            offset, scale = expansion.offsets[slice_index], expansion.scales[slice_index]
            assert torch.equal(numbers * factor * scale, expected + offset)
            assert torch.tensor(-(offset + 16)).to(dtype).item() == -(offset + 16), "the operand that subtracts must be exact"


# --- compiled for every card ------------------------------------------------------------------------------------------


def assert_fits(compiled: list[Compiled], capability: int) -> None:
    for kernel in compiled:
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel
        assert kernel.stack_bytes <= MAX_STACK_BYTES, kernel
        assert ("griddepcontrol" in kernel.ptx) == (capability >= 90), kernel.name


def compile_skinny(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype, capability: int, config=None) -> list[Compiled]:
    weight = torch.empty(out_features, in_features, dtype=dtype)
    x, out = torch.empty(num_rows, in_features, dtype=dtype), torch.empty(num_rows, out_features, dtype=dtype)
    return compile_op(lambda: skinny_linear(x, weight, config=config, out=out), capability)


@pytest.mark.parametrize("num_rows", ROWS_OF_BUCKET)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_skinny_products_compile_for_every_card(num_rows: int, capability: int) -> None:
    assert_fits(compile_skinny(num_rows, 1000, 5120, torch.bfloat16, capability), capability)


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "shape"), [(rows, shape) for (_, rows), shape in TABLE.items()])
def test_every_configuration_of_the_table_compiles(num_rows: int, shape: tuple[int, int]) -> None:
    assert_fits(compile_skinny(num_rows, shape[1], shape[0], torch.bfloat16, 90), 90)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 2, 64])
@pytest.mark.parametrize(("dtype", "in_features"), [(torch.float16, 4096), (torch.float32, 4096), (torch.bfloat16, 301)])
def test_other_types_and_odd_sizes_compile(num_rows: int, dtype: torch.dtype, in_features: int) -> None:
    for capability in (86, 90):
        assert_fits(compile_skinny(num_rows, 1000, in_features, dtype, capability), capability)


@pytest.mark.parametrize("capability", [86, 90])
def test_products_of_one_row_with_their_neighbours_compile(capability: int) -> None:
    x, norm_weight, weight = torch.empty(1, 2048).bfloat16(), torch.empty(2048).bfloat16(), torch.empty(1024, 2048).bfloat16()
    residual, half = torch.empty(1, 1024).bfloat16(), torch.empty(1024, 1024).bfloat16()
    assert_fits(compile_op(lambda: norm_row_linear(x, norm_weight, weight, eps=1e-6), capability), capability)
    assert_fits(compile_op(lambda: silu_mul_row_linear(x, half, residual=residual, out=residual), capability), capability)
    assert_fits(compile_op(lambda: row_linear(x, weight, residual=residual), capability), capability)


def compile_w4(num_rows: int, shape: tuple[int, int, int], dtype: torch.dtype, capability: int, *, uniform: bool = True) -> list[Compiled]:
    out_features, in_features, group_size = shape
    groups = 1 if group_size == -1 else in_features // group_size
    packed = pack_w4(*random_codes(out_features, in_features, groups, uniform=uniform))
    x, out = torch.empty(num_rows, in_features, dtype=dtype), torch.empty(num_rows, out_features, dtype=dtype)
    return compile_op(lambda: w4.w4a16_linear(x, packed, out=out), capability)


@pytest.mark.parametrize(("num_rows", "dtype"), [(1, torch.bfloat16), (64, torch.float16)])
@pytest.mark.parametrize("capability", [86, 90])
def test_4_bit_products_compile(num_rows: int, dtype: torch.dtype, capability: int) -> None:
    assert_fits(compile_w4(num_rows, (512, 1024, 128), dtype, capability), capability)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 16, 32, 64])
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_4_bit_products_compile_for_every_card(num_rows: int, dtype: torch.dtype, capability: int) -> None:
    assert_fits(compile_w4(num_rows, (512, 1024, 128), dtype, capability, uniform=False), capability)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 32])
@pytest.mark.parametrize("shape", [(512, 1024, 32), (512, 1024, 64), (512, 1024, -1), (70, 301, -1)])
@pytest.mark.parametrize("uniform", [False, True])
def test_4_bit_groups_of_all_sizes_compile(num_rows: int, shape: tuple[int, int, int], uniform: bool) -> None:
    for capability in (86, 90):
        assert_fits(compile_w4(num_rows, shape, torch.bfloat16, capability, uniform=uniform), capability)


def test_expansion_of_4_bit_weights_compiles() -> None:
    packed = pack_w4(*random_codes(128, 256, 2, uniform=False))
    for capability in CAPABILITIES:
        (kernel,) = compile_op(lambda: w4.dequantize_w4(packed, torch.bfloat16), capability)
        assert kernel.shared_bytes <= SHARED_BYTES[86]


# --- configurations ---------------------------------------------------------------------------------------------------


def test_the_configuration_is_the_measured_one_where_there_is_one() -> None:
    assert choose_config(1, 151936, 1024, capability=90) == RowConfig(8, 512)
    assert choose_config(8, 4096, 4096, capability=90) == DotConfig(64, 128, splits=2)
    assert choose_config(32, 1024, 3072, capability=90) == DotConfig(32, 128, splits=4)


def test_other_cards_and_shapes_get_a_default() -> None:
    assert choose_config(1, 4096, 1024, capability=86) == RowConfig(4, 1024)
    assert choose_config(1, 4096, 11008, capability=90) == RowConfig(8, 1024)
    assert choose_config(1, 4096, 14336, capability=90) == RowConfig(4, 1024)
    assert choose_config(8, 1024, 4096, capability=80) == DotConfig(64, 128, 4, 3, splits=8)
    assert choose_config(8, 1024, 4096, capability=89) == DotConfig(64, 64, 4, 3, splits=8)


@pytest.mark.parametrize(("num_rows", "bucket"), [(1, 0), (2, 1), (16, 1), (17, 2), (32, 2), (33, 3), (64, 3)])
def test_buckets_of_rows(num_rows: int, bucket: int) -> None:
    assert linear_settings.row_bucket(num_rows) == bucket


@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features", "splits"),
    [
        (1, 22016, 4096, 2),  # 344 tiles on 132 x 7 places
        (1, 12288, 4096, 4),
        (1, 4096, 11008, 8),
        (16, 22016, 4096, 2),
        (32, 22016, 4096, 1),  # 172 tiles on 264 places; more parts would cost more than they gain
        (32, 4096, 4096, 8),
        (64, 22016, 4096, 1),
        (64, 4096, 4096, 4),
        (1, 151936, 1024, 1),
        (1, 64, 256, 1),
    ],
)
def test_4_bit_products_are_split_where_the_card_has_places_left(num_rows: int, out_features: int, in_features: int, splits: int) -> None:
    assert choose_w4_config(num_rows, out_features, in_features, H200).splits == splits


def test_a_product_is_split_no_further_than_the_workspace_holds() -> None:
    workspace = SplitKWorkspace.allocate(torch.device("cpu"))
    assert workspace.fitting(8, 64, 22016, 64) == 2
    assert workspace.fitting(8, 1, 22016, 64) == 8
    assert workspace.fitting(2, 1, 1 << 20, 4) == 1


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "weight", "match"),
    [
        (torch.zeros(65, 8), torch.zeros(4, 8), "1 to 64 rows"),
        (torch.zeros(2, 8), torch.zeros(4, 9), r"\[N, 8\]"),
        (torch.zeros(2, 8), torch.zeros(4, 8).half(), "one dtype"),
        (torch.zeros(2, 8), torch.zeros(8, 4).t(), "contiguous"),
    ],
)
def test_operands_that_the_kernels_do_not_read_are_refused(x: torch.Tensor, weight: torch.Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        skinny_linear(x, weight)


def test_the_configuration_of_one_row_is_refused_for_more() -> None:
    with pytest.raises(ValueError, match="1 to 1 rows"):
        skinny_linear(torch.zeros(2, 8), torch.zeros(4, 8), config=RowConfig(4, 16))


def test_a_norm_weight_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="norm_weight must be"):
        norm_row_linear(torch.zeros(1, 8), torch.zeros(7), torch.zeros(4, 8), eps=1e-6)


def test_a_result_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="out must be"):
        skinny_linear(torch.zeros(2, 8), torch.zeros(4, 8), out=torch.zeros(2, 5))


def test_4_bit_weights_want_16_bit_rows_of_their_length() -> None:
    packed = pack_w4(*random_codes(8, 64, 1, uniform=True))
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        w4.w4a16_linear(torch.zeros(1, 64), packed)
    with pytest.raises(ValueError, match=r"\[rows, 64\]"):
        w4.w4a16_linear(torch.zeros(1, 65).half(), packed)
