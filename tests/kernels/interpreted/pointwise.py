"""Norms, the gate, rotation with KV write and step inputs under the interpreter, against their references."""

from __future__ import annotations

import pytest
import torch

from support import pointwise_checks as checks

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


@DTYPES
@pytest.mark.parametrize("shape", [(5, 123), (1, 1), (3, 7, 18), (0, 16), (9, 64), (2, 4096)])
def test_norms_equal_their_references(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    checks.check_norms(shape, dtype)


@DTYPES
@pytest.mark.parametrize(("num_rows", "dim"), [(5, 123), (1, 1), (0, 16), (17, 64), (33, 40), (2, 4096), (129, 20)])
def test_norms_may_come_in_another_order(num_rows: int, dim: int, dtype: torch.dtype) -> None:
    checks.check_norms_in_order(num_rows, dim, dtype)


@DTYPES
def test_norm_takes_heads_at_any_stride_with_a_weight_row_each(dtype: torch.dtype) -> None:
    checks.check_norm_of_heads(7, 3, 40, dtype)


def test_norm_of_large_float16_is_finite() -> None:
    large = torch.full((1, 64), 60000.0, dtype=torch.float16)
    weight = torch.ones(64, dtype=torch.float16)
    checks.assert_equal(checks.norms.rms_norm(large, weight, eps=1e-6), torch.ones(1, 64, dtype=torch.float16))


@DTYPES
@pytest.mark.parametrize(("num_rows", "width"), [(5, 123), (1, 2048), (3, 1), (0, 8)])
def test_silu_mul_equals_its_reference(num_rows: int, width: int, dtype: torch.dtype) -> None:
    checks.check_silu_mul(num_rows, width, dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_silu_mul_of_large_gates_does_not_overflow() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 3.0, 3.0]])
    assert checks.activation.silu_mul(gate_up).tolist() == [[0.0, 600.0]]


@DTYPES
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(5, 1, 80), (4, 2, 64), (1, 1, 256), (7, 7, 18)])
def test_rotary_kv_equals_its_reference(num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, dtype: torch.dtype) -> None:
    checks.check_rotary_kv(
        num_tokens=5, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, has_norm=has_norm, block_size=8
    )


def test_rotary_kv_of_many_tokens_takes_more_heads_a_program() -> None:
    checks.check_rotary_kv(num_tokens=66, num_heads=3, num_kv_heads=1, head_dim=32, dtype=torch.float32, has_norm=True, num_blocks=20)


@DTYPES
def test_rotary_kv_rounds_to_float8_as_its_reference(dtype: torch.dtype) -> None:
    checks.check_rotary_kv(
        num_tokens=5, num_heads=4, num_kv_heads=2, head_dim=80, dtype=dtype, has_norm=True, cache_dtype=torch.float8_e4m3fn
    )


@DTYPES
def test_values_are_written_as_the_nearest_float8(dtype: torch.dtype) -> None:
    checks.check_float8_values(dtype)


def test_no_tokens_launch_nothing() -> None:
    checks.check_rotary_kv(num_tokens=0, num_heads=3, num_kv_heads=1, head_dim=32, dtype=torch.float32, has_norm=True)


@pytest.mark.parametrize("block_size", [8, 16, 24])
def test_decode_inputs_equal_their_reference(block_size: int) -> None:
    checks.check_decode_inputs(num_rows=6, rows=[3, 0, -1, 5, 1, -1], max_blocks=5, block_size=block_size)


def test_long_block_tables_take_several_programs() -> None:
    checks.check_decode_inputs(num_rows=3, rows=[2, 0], max_blocks=600, block_size=8)
