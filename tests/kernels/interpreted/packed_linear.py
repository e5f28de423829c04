"""Products with packed weights under the interpreter, against the plain torch references."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from pagedcore_kernels.packed_weights import pack_weights
from pagedcore_kernels.reference import packed_linear as reference
from pagedcore_kernels.triton_ops import code_expansion
from pagedcore_kernels.triton_ops.code_expansion import _less_zero, expand_scaled
from pagedcore_kernels.triton_ops.dequantize import dequantize
from pagedcore_kernels.triton_ops.packed_linear import packed_linear
from pagedcore_kernels.triton_ops.packed_settings import FewRowsConfig, ManyRowsConfig, PackedConfig
from pagedcore_kernels.triton_ops.split_k import SplitKWorkspace
from pagedcore_kernels.triton_ops.take_columns import take_columns
from support.linear_problems import assert_product, poisoned, random_packed, random_rows

PADDED_SHAPES = [(5, 301, -1), (9, 33, -1), (65, 160, 32), (70, 320, 64), (64, 384, 128)]
FEW, MANY = FewRowsConfig(64, splits=2), ManyRowsConfig(16, 128, 32, splits=2)


def poisoned_workspace() -> SplitKWorkspace:
    return SplitKWorkspace(poisoned(1 << 16, dtype=torch.float32), torch.zeros(64, dtype=torch.int32))


def check(
    num_rows: int, out_features: int, in_features: int, group_size: int, *, uniform: bool, bits: int = 4, config: PackedConfig | None
) -> None:
    packed = random_packed(out_features, in_features, group_size, uniform=uniform, bits=bits)
    x, bias = random_rows(num_rows, in_features, torch.float16), torch.randn(out_features).half()
    workspace, out = poisoned_workspace(), poisoned(num_rows, out_features, dtype=torch.float16)
    assert packed_linear(x, packed, bias, config=config, workspace=workspace, out=out) is out
    assert_product(out, reference.packed_linear(x.float(), packed, bias.float()))
    assert not workspace.counters.any()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("config", [FEW, MANY])
@pytest.mark.parametrize("group_size", [32, 96, 128, 256, -1])
def test_groups_and_zero_points(group_size: int, config: PackedConfig, uniform: bool, bits: int) -> None:
    check(3, 70, 768 if group_size in (96, 256) else 256, group_size, uniform=uniform, bits=bits, config=config)


@pytest.mark.parametrize("num_rows", [1, 9, 16, 17, 33, 65, 257])
@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_of_rows_as_they_are_chosen_for(num_rows: int, bits: int) -> None:
    check(num_rows, 70, 256, 128, uniform=bits == 4, bits=bits, config=None)


def test_rows_that_several_programs_share() -> None:
    check(37, 70, 256, 128, uniform=False, config=ManyRowsConfig(16, 64, 64, splits=2))


@pytest.mark.parametrize("config", [FewRowsConfig(256), ManyRowsConfig(16, 256, 32)])
def test_tiles_that_do_not_divide_the_padded_outputs_are_narrowed(config: PackedConfig) -> None:
    check(5, 300, 256, 128, uniform=False, config=config)


def test_no_rows_are_no_product() -> None:
    assert packed_linear(torch.empty(0, 64).half(), random_packed(5, 64, -1, uniform=True)).shape == (0, 5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("out_features", "in_features", "group_size"), PADDED_SHAPES)
def test_shapes_that_are_padded(out_features: int, in_features: int, group_size: int, bits: int) -> None:
    check(2, out_features, in_features, group_size, uniform=False, bits=bits, config=FewRowsConfig(64))
    check(20, out_features, in_features, group_size, uniform=bits == 4, bits=bits, config=ManyRowsConfig(32, 64, 32))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("out_features", "in_features", "group_size"), PADDED_SHAPES)
def test_weights_expand_to_the_very_bits_of_the_reference(out_features, in_features, group_size, dtype, uniform, bits) -> None:
    packed = random_packed(out_features, in_features, group_size, uniform=uniform, bits=bits)
    out = poisoned(out_features, in_features, dtype=dtype)
    assert dequantize(packed, dtype, out=out) is out
    assert torch.equal(out, reference.dequantize(packed, dtype))


@triton.jit
def _less_zero_kernel(scales_ptr, out_ptr, offset: tl.constexpr, zero: tl.constexpr, num: tl.constexpr) -> None:
    places = tl.arange(0, num)
    like = tl.load(out_ptr + places)
    tl.store(out_ptr + places, _less_zero(tl.load(scales_ptr + places), like, offset, zero))


@pytest.mark.parametrize(  # the interpreter makes no bfloat16 constants
    ("dtype", "uniform_zero"), [(torch.float16, None), (torch.bfloat16, None), (torch.float16, 0), (torch.float16, 16)]
)
def test_what_cards_add_to_4_bit_codes_takes_off_each_zero_point_exactly(
    dtype: torch.dtype, uniform_zero: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_expansion, "INTERPRETED", False)
    zeros = torch.arange(32, dtype=torch.uint8) % 17
    codes, scales = torch.zeros(32, 64, dtype=torch.uint8), (0.5 + torch.rand(32, 1)).to(dtype).float()
    stored = pack_weights(codes, scales, zeros[:, None]).scales[0, :32].contiguous()
    wanted = zeros.double() if uniform_zero is None else torch.full((32,), uniform_zero, dtype=torch.float64)
    for offset in expand_scaled(dtype, 4).offsets:
        out = poisoned(32, dtype=dtype)
        _less_zero_kernel[(1,)](stored, out, offset, -1 if uniform_zero is None else uniform_zero, 32)
        assert torch.equal(out.double(), -(offset + wanted))


@pytest.mark.parametrize("width", [33, 1030])
def test_columns_are_taken_in_the_order_asked_for(width: int) -> None:
    x, order, out = random_rows(3, width, torch.float16), torch.randperm(width).int(), poisoned(3, width, dtype=torch.float16)
    assert take_columns(x, order, out=out) is out
    assert torch.equal(out, x[:, order.long()])
    assert take_columns(x[:0], order).shape == (0, width)
