"""Skinny products under the interpreter, against the plain torch references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore_kernels.reference import linear as reference
from pagedcore_kernels.triton_ops.linear_settings import DotConfig, RowConfig
from pagedcore_kernels.triton_ops.skinny_linear import skinny_linear
from pagedcore_kernels.triton_ops.split_k import SplitKWorkspace
from support.linear_problems import assert_product, poisoned, random_rows

TYPES = [torch.float32, torch.float16]


def poisoned_workspace() -> SplitKWorkspace:
    return SplitKWorkspace(poisoned(1 << 16, dtype=torch.float32), torch.zeros(64, dtype=torch.int32))


def check_skinny(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype, config, *, has_bias: bool = True) -> None:
    x, weight = random_rows(num_rows, in_features, dtype), random_rows(out_features, in_features, dtype)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    workspace, out = poisoned_workspace(), poisoned(num_rows, out_features, dtype=dtype)
    assert skinny_linear(x, weight, bias, config=config, workspace=workspace, out=out) is out
    assert_product(out, reference.skinny_linear(x.double().float(), weight.float(), bias if bias is None else bias.float()))
    assert not workspace.counters.any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("out_features", "in_features", "config"),
    [
        (7, 64, RowConfig(2, 64)),
        (5, 33, RowConfig(4, 64)),
        (9, 300, RowConfig(2, 64)),
        (9, 301, RowConfig(4, 32, splits=3)),
        (3, 40, RowConfig(1, 16, splits=4)),
        (9, 100, RowConfig(2, 128)),
        (9, 100, RowConfig(4, 32)),
        (9, 100, RowConfig(4, 16, splits=3)),
    ],
)
def test_one_row(out_features: int, in_features: int, config: RowConfig, dtype: torch.dtype) -> None:
    check_skinny(1, out_features, in_features, dtype, config, has_bias=in_features % 2 == 0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("num_rows", "out_features", "in_features", "config"),
    [
        (2, 7, 64, RowConfig(2, 64)),
        (2, 9, 100, RowConfig(4, 128)),
        (2, 5, 33, RowConfig(1, 64)),
        (2, 33, 96, DotConfig(16, 32)),
        (16, 32, 128, DotConfig(32, 32, splits=2)),
        (17, 20, 129, DotConfig(16, 32, splits=3)),
        (64, 5, 47, DotConfig(16, 16, splits=8)),
    ],
)
def test_several_rows(num_rows: int, out_features: int, in_features: int, config: DotConfig, dtype: torch.dtype) -> None:
    check_skinny(num_rows, out_features, in_features, dtype, config)


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 64), st.integers(1, 70), st.integers(1, 140))
def test_any_shape_with_the_configuration_that_is_chosen(num_rows: int, out_features: int, in_features: int) -> None:
    check_skinny(num_rows, out_features, in_features, torch.float16, None)


def test_a_split_product_gives_the_same_bits_again() -> None:
    x, weight = random_rows(3, 256, torch.float32), random_rows(20, 256, torch.float32)
    config = DotConfig(16, 16, splits=8)
    first = skinny_linear(x, weight, config=config, workspace=poisoned_workspace())
    assert torch.equal(first, skinny_linear(x, weight, config=config, workspace=poisoned_workspace()))


def test_a_row_gives_the_same_bits_beside_another() -> None:
    x, weight = random_rows(2, 100, torch.float32), random_rows(9, 100, torch.float32)
    both = skinny_linear(x, weight, config=RowConfig(2, 128))
    assert torch.equal(both, torch.cat([skinny_linear(row[None], weight, config=RowConfig(2, 128)) for row in x]))
