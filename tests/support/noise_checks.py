"""Checks of the noise that kernels add, against the plain torch op of the same integers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagedcore_kernels import gumbel_noise
from pagedcore_kernels.triton_ops.attention_common import INTERPRETED
from pagedcore_kernels.triton_ops.gumbel import APPROXIMATION_ERROR, add_gumbel, approximate_gumbel, noise_key

SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 12345, 7)
INDICES = (0, 1, 7, 1000, 5, 131071, 2**40)


@triton.jit
def _noise_kernel(exact_ptr, near_ptr, seeds_ptr, indices_ptr, first_id, num_ids, BLOCK: tl.constexpr, FAST: tl.constexpr):  # noqa: N803
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = noise_key(tl.load(seeds_ptr + row), tl.load(indices_ptr + row))
    zeros = tl.zeros([BLOCK], tl.float32)
    inside = column < num_ids
    tl.store(exact_ptr + row * num_ids + column, add_gumbel(zeros, 1.0, key, first_id + column), mask=inside)
    tl.store(near_ptr + row * num_ids + column, approximate_gumbel(key, first_id + column, FAST), mask=inside)


def check_noise(num_ids: int, first_id: int = 0, device: str = "cpu") -> None:
    seeds, indices = (torch.tensor(values, device=device) for values in (SEEDS, INDICES))
    exact, near = (torch.full((len(SEEDS), num_ids), float("nan"), device=device) for _ in range(2))
    _noise_kernel[(len(SEEDS), triton.cdiv(num_ids, 1024))](
        exact, near, seeds, indices, first_id, num_ids, BLOCK=1024, FAST=not INTERPRETED
    )
    expected = gumbel_noise(seeds, indices, torch.arange(first_id, first_id + num_ids, device=device))
    torch.testing.assert_close(exact, expected, atol=2e-6, rtol=5e-7)
    assert float((near - exact).abs().max()) < APPROXIMATION_ERROR.value / 2
