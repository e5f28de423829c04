"""Products to check: random operands on any device, NaN wherever a kernel should write, a tolerance for each type."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedcore_kernels.packed_weights import PackedWeights, pack_weights

RELATIVE_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def assert_product(actual: Tensor, expected: Tensor) -> None:
    """Both [M, N]; each row and the whole within the rounding of the result's type."""
    assert actual.shape == expected.shape
    limit = RELATIVE_ERROR[actual.dtype]
    error = relative_error(actual, expected)
    assert error < limit, f"relative error {error}"
    worst = ((actual.double() - expected.double()).norm(dim=1) / (expected.double().norm(dim=1) + 1e-30)).max()
    assert worst < 4 * limit, f"relative error {float(worst)} of one row"


def poisoned(*shape: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def random_rows(rows: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """[rows, columns] with contiguous rows inside a wider tensor that is NaN elsewhere."""
    pad = 16
    wide = poisoned(rows, columns + pad, dtype=dtype, device=device)
    wide[:, :columns] = torch.randn(rows, columns, device=device).to(dtype)
    return wide[:, :columns]


def random_codes(
    out_features: int, in_features: int, groups: int, *, uniform: bool, bits: int = 4, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """codes, scales that are float16 numbers, and zero points from 0 to 2^bits, or 255."""
    codes = torch.randint(0, 1 << bits, (out_features, in_features), dtype=torch.uint8, device=device)
    scales = (torch.rand(out_features, groups, device=device) * 0.02 + 0.001).half().float()
    zeros = torch.randint(0, min((1 << bits) + 1, 256), (out_features, groups), dtype=torch.uint8, device=device)
    return codes, scales, torch.full_like(zeros, 1 << (bits - 1)) if uniform else zeros


def random_packed(
    out_features: int, in_features: int, group_size: int, *, uniform: bool, bits: int = 4, device: str = "cpu"
) -> PackedWeights:
    """`group_size` -1 is one group."""
    groups = 1 if group_size == -1 else in_features // group_size
    return pack_weights(*random_codes(out_features, in_features, groups, uniform=uniform, bits=bits, device=device), bits=bits)
