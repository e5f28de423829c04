# ruff: noqa: E402
"""Products with packed weights: interpreted checks, packing, the assembly that expands codes, compiled for every card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedcore_kernels.packed_weights import pack_weights, unpack_weights
from pagedcore_kernels.reference.packed_linear import dequantize as reference_dequantize
from support.linear_problems import random_codes, random_packed
from support.ptx import pair, run_ptx, single, unpair
from support.triton_interpreter import needs_triton, run_interpreted

pytestmark = needs_triton
pytest.importorskip("triton")

from pagedcore_kernels.triton_ops.code_expansion import expand_less_zero, expand_raw, expand_scaled
from pagedcore_kernels.triton_ops.dequantize import dequantize
from pagedcore_kernels.triton_ops.packed_linear import packed_linear
from pagedcore_kernels.triton_ops.packed_settings import LARGE_TILES, ROW_BUCKETS, FewRowsConfig, ManyRowsConfig
from pagedcore_kernels.triton_ops.take_columns import take_columns
from support.triton_compile import CAPABILITIES, Compiled, assembler_report, compile_op

SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
MAX_STACK_BYTES = 80
"""A few registers of a thread may be spilled: where their number is limited so that more programs fit, and by the largest tiles."""
HALF_TYPES = [torch.float16, torch.bfloat16]


def test_kernels_equal_the_reference_under_the_interpreter() -> None:
    run_interpreted("packed_linear.py")


# --- packing ----------------------------------------------------------------------------------------------------------


def test_a_word_holds_one_code_of_each_slice_with_slices_1_and_2_swapped() -> None:
    codes = torch.zeros(1, 256, dtype=torch.uint8)
    codes[0, 3], codes[0, 64 + 3], codes[0, 128 + 3], codes[0, 192 + 3] = 1, 2, 3, 4
    words = pack_weights(codes, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.uint8)).words
    assert words.shape == (2, 1, 64, 64)
    assert words[0, 0, 0, 3].item() == 0x4231
    assert words.count_nonzero() == 1


def test_a_word_of_8_bit_codes_holds_slice_0_in_its_low_byte() -> None:
    codes = torch.zeros(1, 128, dtype=torch.uint8)
    codes[0, 3], codes[0, 64 + 3] = 0x81, 0x42
    words = pack_weights(codes, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.uint8), bits=8).words
    assert words.shape == (2, 1, 64, 64)
    assert words[0, 0, 0, 3].item() == 0x4281
    assert words.count_nonzero() == 1


def test_a_zero_point_of_a_group_stands_in_the_low_bits_of_its_scale() -> None:
    scales, zeros = torch.tensor([[0.5, 0.25]]), torch.tensor([[3, 16]], dtype=torch.uint8)
    packed = pack_weights(torch.zeros(1, 64, dtype=torch.uint8), scales, zeros)
    assert packed.uniform_zero is None
    assert packed.scales[:2, 0].view(torch.int32).tolist() == [0x3F000003, 0x3E800010]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize(("in_features", "group_size"), [(384, 128), (320, 32), (192, 64), (301, 301), (96, 96)])
def test_packing_loses_nothing(in_features: int, group_size: int, uniform: bool, bits: int) -> None:
    codes, scales, zeros = random_codes(70, in_features, in_features // group_size, uniform=uniform, bits=bits)
    packed = pack_weights(codes, scales, zeros, bits=bits)
    assert packed.uniform_zero == (1 << (bits - 1) if uniform else None)
    assert all(torch.equal(was, now) for was, now in zip((codes, scales, zeros), unpack_weights(packed), strict=True))
    expected = (codes.float() - zeros.float().repeat_interleave(group_size, 1)) * scales.repeat_interleave(group_size, 1)
    assert torch.equal(reference_dequantize(packed, torch.float32), expected)


def test_scales_of_one_zero_point_keep_all_their_bits() -> None:
    scales = torch.rand(4, 2)
    codes, zeros = torch.zeros(4, 128, dtype=torch.uint8), torch.full((4, 2), 7, dtype=torch.uint8)
    assert torch.equal(unpack_weights(pack_weights(codes, scales, zeros))[1], scales)


def test_a_last_group_may_be_short_if_the_group_size_is_given() -> None:
    codes, scales, zeros = random_codes(3, 160, 2, uniform=False)
    expected = (codes.float() - zeros.float().repeat_interleave(128, 1)[:, :160]) * scales.repeat_interleave(128, 1)[:, :160]
    assert torch.equal(reference_dequantize(pack_weights(codes, scales, zeros, group_size=128), torch.float32), expected)


@pytest.mark.parametrize(
    ("in_features", "groups", "group_size", "match"),
    [(96, 4, None, "group size is 24"), (160, 2, 64, "not 2 groups"), (100, 3, None, "not 3 groups")],
)
def test_groups_that_the_layout_cannot_hold_are_refused(in_features: int, groups: int, group_size: int | None, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        pack_weights(*random_codes(2, in_features, groups, uniform=True), group_size=group_size)


def test_bits_that_the_layout_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="not of 3"):
        pack_weights(*random_codes(2, 64, 1, uniform=True), bits=3)


def test_more_scales_than_the_kernels_count_are_refused() -> None:
    codes = torch.empty(1 << 21, 1 << 15, dtype=torch.uint8, device="meta")
    groups = torch.empty(1 << 21, 1 << 10, device="meta")
    with pytest.raises(ValueError, match="1024 groups of 2097152 outputs have 2147483648 scales; a packed matrix has up to 2147483647"):
        pack_weights(codes, groups, groups.byte())


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_of_group_128_take_their_bits_and_a_quarter(bits: int) -> None:
    packed = random_packed(4096, 1024, 128, uniform=False, bits=bits)
    assert packed.num_bytes == 4096 * 1024 * bits // 8 + 4096 * 8 * 4


# --- expansion of codes -----------------------------------------------------------------------------------------------


def words_of(bits: int) -> list[tuple[int, list[torch.Tensor]]]:
    """Registers of two words, and the two codes of each slice, so that every code stands in every place."""
    cases = []
    for first in range(1 << bits):
        block = 64 * 16 // bits
        codes = ((torch.arange(block) * 37 + first) % (1 << bits)).to(torch.uint8)[None]
        words = pack_weights(codes, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.uint8), bits=bits).words[0, 0, 0]
        register = int(words[:2].contiguous().view(torch.int32).item()) & 0xFFFFFFFF
        cases.append((register, [codes[0, 64 * index : 64 * index + 2].double() for index in range(16 // bits)]))
    return cases


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_raw_4_bit_codes_are_the_numbers_that_the_kernel_takes_them_for(dtype: torch.dtype) -> None:
    expansion = expand_raw(dtype)
    for register, slices in words_of(4):
        for index, codes in enumerate(slices):
            numbers = unpair(run_ptx(expansion.asm[index], [register]), dtype)
            assert torch.equal(numbers * expansion.factors[index], codes + expansion.offsets[index])


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("zero", [0, 128, 255])
def test_8_bit_codes_less_their_zero_point_are_exact(zero: int, dtype: torch.dtype) -> None:
    expansion = expand_less_zero(dtype)
    for register, slices in words_of(8):
        for index, codes in enumerate(slices):
            offset = -(expansion.offsets[index] + zero)
            addends = [pair([offset, offset], dtype)] if dtype == torch.float16 else [single(offset)] * 2
            assert torch.equal(unpair(run_ptx(expansion.asm[index], [register, *addends]), dtype), codes - zero)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("zero", [0, 7, 16])
def test_4_bit_weights_are_rounded_once(zero: int, dtype: torch.dtype) -> None:
    expansion, scale = expand_scaled(dtype, 4), 1531 * 2.0**-17  # a float16 number that lies between two of bfloat16
    near = torch.tensor(scale).to(dtype).item()
    for register, slices in words_of(4):
        for index, codes in enumerate(slices):
            offset = -(expansion.offsets[index] + zero)
            assert torch.tensor(offset).to(dtype).item() == offset, "the operand that subtracts must be exact"
            operands = [pair([value, value], dtype) for value in (offset, near, scale - near)]
            weights = unpair(run_ptx(expansion.asm[index], [register, *operands]), dtype)
            assert torch.equal(weights, ((codes - zero) * scale).to(dtype).double())


def test_a_zero_point_in_the_low_bits_of_a_float16_scale_is_rounded_away() -> None:
    """For every scale from 0 to the largest: many rows in float16 take it with the zero point in it."""
    scales = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16)[:, None]
    codes = torch.zeros(len(scales), 32, dtype=torch.uint8)
    for zero in range(17):
        zeros = torch.full(scales.shape, zero, dtype=torch.uint8)
        zeros[0] = 16 - zero if zero != 8 else 0  # else they were uniform, and stored beside the scales
        packed = pack_weights(codes, scales.float(), zeros)
        assert packed.uniform_zero is None
        assert torch.equal(packed.scales[0, : len(scales), None].half(), scales)


@pytest.mark.parametrize("scale", [0.01171112060546875, 3 * 2.0**-23], ids=["normal", "subnormal"])
@pytest.mark.parametrize("zero", [0, 77, 255])
def test_8_bit_weights_are_rounded_once(zero: int, scale: float) -> None:
    expansion = expand_scaled(torch.float16, 8)
    assert torch.tensor(scale).half().item() == scale
    for register, slices in words_of(8):
        for index, codes in enumerate(slices):
            operands = [pair([value] * 2, torch.float16) for value in (-(expansion.offsets[index] + zero) / 64, scale * 64)]
            weights = unpair(run_ptx(expansion.asm[index], [register, *operands]), torch.float16)
            assert torch.equal(weights, ((codes - zero) * scale).half().double())


def test_8_bit_weights_of_bfloat16_are_rounded_once() -> None:
    expansion, scale, zero = expand_scaled(torch.bfloat16, 8), 0.01171112060546875, 77
    for register, slices in words_of(8):
        for index, codes in enumerate(slices):
            addend, factor = single(-(expansion.offsets[index] + zero)), single(scale)
            weights = unpair(run_ptx(expansion.asm[index], [register, addend, addend, factor, factor]), torch.bfloat16)
            assert torch.equal(weights, ((codes - zero) * scale).float().bfloat16().double())


# --- compiled for every card ------------------------------------------------------------------------------------------


def assert_fits(compiled: list[Compiled], capability: int) -> None:
    for kernel in compiled:
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel
        assert kernel.stack_bytes <= MAX_STACK_BYTES, kernel
        assert ("griddepcontrol" in kernel.ptx) == (capability >= 90), kernel.name


def compile_packed(
    num_rows: int, shape: tuple[int, int, int], dtype: torch.dtype, capability: int, *, uniform: bool = True, bits: int = 4
) -> list[Compiled]:
    packed = random_packed(*shape, uniform=uniform, bits=bits)
    x, out = torch.empty(num_rows, shape[1], dtype=dtype), torch.empty(num_rows, shape[0], dtype=dtype)
    return compile_op(lambda: packed_linear(x, packed, out=out), capability)


@pytest.mark.parametrize(
    ("num_rows", "bits", "dtype"),
    [(1, 4, torch.bfloat16), (8, 8, torch.float16), (64, 4, torch.float16), (64, 8, torch.float16), (128, 8, torch.bfloat16)],
)
@pytest.mark.parametrize("capability", [86, 90])
def test_products_compile(num_rows: int, bits: int, dtype: torch.dtype, capability: int) -> None:
    assert_fits(compile_packed(num_rows, (512, 1024, 128), dtype, capability, bits=bits), capability)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_products_compile_for_every_card(num_rows: int, capability: int, dtype: torch.dtype, bits: int) -> None:
    assert_fits(compile_packed(num_rows, (512, 1024, 128), dtype, capability, uniform=False, bits=bits), capability)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 32])
@pytest.mark.parametrize("shape", [(512, 1024, 32), (512, 1024, 64), (512, 1024, -1), (70, 301, -1)])
@pytest.mark.parametrize("uniform", [False, True])
def test_groups_of_all_sizes_compile(num_rows: int, shape: tuple[int, int, int], uniform: bool) -> None:
    for capability in (86, 90):
        assert_fits(compile_packed(num_rows, shape, torch.bfloat16, capability, uniform=uniform), capability)


@pytest.mark.parametrize("num_rows", [32, 64, 128])
def test_products_on_hopper_are_not_serialized_by_the_assembler(num_rows: int) -> None:
    """Each dot of the loop is waited for once, not each of its instructions: the loop must be known to be entered."""
    (kernel,) = compile_packed(num_rows, (512, 1024, 128), torch.float16, 90)
    assert "wgmma.mma_async" in kernel.ptx
    assert "serialized" not in assembler_report(kernel.ptx)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("bits", LARGE_TILES)
def test_tiles_compile_and_run_as_many_at_once_as_they_say(bits: int, dtype: torch.dtype, uniform: bool, capability: int) -> None:
    """The number is that of float16 on an H200 with one zero point for all; others take a few registers more or less."""
    packed = random_packed(1024, 1024, 128, uniform=uniform, bits=bits)
    for most_rows, tiles in zip(ROW_BUCKETS, LARGE_TILES[bits], strict=False):
        x, out = torch.empty(most_rows, 1024, dtype=dtype), torch.empty(most_rows, 1024, dtype=dtype)
        for tile in (tile for tile in tiles if tile.dtype in (None, dtype)):
            config = replace(tile.config, splits=2)
            (kernel,) = compile_op(lambda x=x, out=out, config=config: packed_linear(x, packed, out=out, config=config), capability)
            assert_fits([kernel], capability)
            if capability == 90:
                assert "serialized" not in assembler_report(kernel.ptx)
                wanted = tile.programs_at_once
                allowed = (wanted,) if dtype == torch.float16 and uniform else (wanted - 1, wanted, wanted + 1)
                assert programs_at_once(kernel, config.num_warps) in allowed, config


def programs_at_once(kernel: Compiled, num_warps: int) -> int:
    """On a multiprocessor of sm_90, by its registers, which come in eights, and shared memory, of which each program costs 1 KiB more."""
    num_threads = 32 * num_warps
    registers = num_threads * -(-kernel.num_registers // 8) * 8
    return min(65536 // registers, 228 * 1024 // (kernel.shared_bytes + 1024), 2048 // num_threads)


def test_expansion_compiles() -> None:
    packed = random_packed(128, 256, 128, uniform=False)
    for capability in CAPABILITIES:
        (kernel,) = compile_op(lambda: dequantize(packed, torch.bfloat16), capability)
        assert kernel.shared_bytes <= SHARED_BYTES[86]


@pytest.mark.parametrize("capability", [86, 90])
def test_taking_columns_compiles(capability: int) -> None:
    x, order = torch.empty(2, 4096).half(), torch.arange(4096).int()
    assert_fits(compile_op(lambda: take_columns(x, order), capability), capability)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_packed_weights_want_16_bit_rows_of_their_length() -> None:
    packed = random_packed(8, 64, -1, uniform=True)
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        packed_linear(torch.zeros(1, 64), packed)
    with pytest.raises(ValueError, match=r"\[rows, 64\]"):
        packed_linear(torch.zeros(1, 65).half(), packed)


def test_a_configuration_for_few_rows_is_refused_for_more() -> None:
    with pytest.raises(ValueError, match="up to 16, x has 17"):
        packed_linear(torch.zeros(17, 64).half(), random_packed(8, 64, -1, uniform=True), config=FewRowsConfig(64))


def test_more_values_than_the_kernels_count_are_refused() -> None:
    x = torch.zeros(1, 64).half().expand(1 << 28, 64)
    with pytest.raises(ValueError, match="268435456 rows of 8 outputs are 2147483648 values; one product makes up to 2147483647"):
        packed_linear(x, random_packed(8, 64, -1, uniform=True), config=ManyRowsConfig(64, 64, 32))
