"""Products with packed weights under the interpreter, against the plain torch references."""

from __future__ import annotations

import pytest
import torch

from pagedcore_kernels.reference import packed_linear as reference
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


@pytest.mark.parametrize("width", [33, 1030])
def test_columns_are_taken_in_the_order_asked_for(width: int) -> None:
    x, order, out = random_rows(3, width, torch.float16), torch.randperm(width).int(), poisoned(3, width, dtype=torch.float16)
    assert take_columns(x, order, out=out) is out
    assert torch.equal(out, x[:, order.long()])
    assert take_columns(x[:0], order).shape == (0, width)
