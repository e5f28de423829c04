"""The reference ops that a decoder calls, against their formulas, on shapes that divide nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedcore_kernels import add_rms_norm, rms_norm, rotary, silu_mul

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm_formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@DTYPES
@pytest.mark.parametrize("shape", [(5, 123), (1, 1), (3, 7, 18), (0, 16)])
def test_rms_norm_is_its_formula_and_leaves_its_input(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, seed=1)
    before = x.clone()
    normed = rms_norm(x, weight, eps=1e-5)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.double(), norm_formula(x, weight, 1e-5), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(x, before)


def test_rms_norm_of_zeros_is_zero_and_of_large_float16_is_finite() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), eps=1e-6), torch.zeros(2, 8))
    large = torch.full((1, 64), 60000.0, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(large, torch.ones(64, dtype=torch.float16), eps=1e-6), torch.ones(1, 64, dtype=torch.float16))


def test_rms_norm_takes_one_weight_row_a_head() -> None:
    x, weight = draw(4, 5, 8)[:, :3], draw(3, 8, seed=1)
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-5).double(), norm_formula(x, weight, 1e-5), atol=1e-5, rtol=1e-5)


@DTYPES
def test_add_rms_norm_leaves_the_sum_in_the_residual(dtype: torch.dtype) -> None:
    x, residual, weight = draw(5, 123, dtype=dtype), draw(5, 123, dtype=dtype, seed=1), draw(123, dtype=dtype, seed=2)
    expected = x + residual
    normed = add_rms_norm(x, residual, weight, eps=1e-5)
    assert torch.equal(residual, expected)
    assert torch.equal(normed, rms_norm(expected, weight, eps=1e-5))


@DTYPES
def test_silu_mul_is_its_formula_and_leaves_its_input(dtype: torch.dtype) -> None:
    gate_up = draw(5, 2 * 123, dtype=dtype)
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, dim=-1)
    torch.testing.assert_close(silu_mul(gate_up).double(), gate / (1 + (-gate).exp()) * up, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(gate_up, before)


@DTYPES
def test_rotary_turns_each_pair_and_leaves_its_input(dtype: torch.dtype) -> None:
    heads = draw(5, 7, 18, dtype=dtype)[:, 1:4]
    angles = draw(5, 1, 9, seed=1)
    before = heads.clone()
    turned = rotary(heads, angles.cos().to(dtype), angles.sin().to(dtype))
    assert turned.shape == heads.shape
    pairs = torch.complex(*heads.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles.double()), angles.double())
    torch.testing.assert_close(turned.double(), torch.cat((pairs.real, pairs.imag), dim=-1), atol=TOLERANCE[dtype], rtol=0.0)
    assert torch.equal(heads, before)
