"""What this card reaches: reading, copying, multiplying."""

# ruff: noqa: TID253 - only the command that needs a GPU imports this folder

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from pagedcore.commands.bench.roofline.case import Roof
from pagedcore.commands.bench.roofline.timer import time_calls

SHARE_OF_FREE = 0.25
MAX_BYTES = 4 << 30
MATRIX = 8192


@dataclass(frozen=True, slots=True)
class Roofs:
    """Bytes and floating-point operations a second, each the median of the rounds."""

    read_bytes_per_s: float
    """A sum over memory."""
    copy_bytes_per_s: float
    """Bytes read and bytes written of a copy, together."""
    matmul_flops_per_s: float
    """A product of two square matrices in the model's dtype."""

    def per_s(self, roof: Roof) -> float:
        return {"read": self.read_bytes_per_s, "copy": self.copy_bytes_per_s, "matmul": self.matmul_flops_per_s}[roof]


def measure_roofs(dtype: torch.dtype, num_rounds: int) -> Roofs:
    read, copy = measure_memory(num_rounds)
    torch.cuda.empty_cache()
    left, right = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=dtype) for _ in range(2))
    matmul_us = statistics.median(time_calls(lambda: left @ right, num_rounds))
    return Roofs(read_bytes_per_s=read, copy_bytes_per_s=copy, matmul_flops_per_s=2e6 * MATRIX**3 / matmul_us)


def measure_memory(num_rounds: int) -> tuple[float, float]:
    """Bytes a second of a sum, and of a copy."""
    free, _ = torch.cuda.mem_get_info()
    source = torch.ones(min(MAX_BYTES, int(free * SHARE_OF_FREE)) // 4, device="cuda")
    target = torch.empty_like(source)
    read_us = statistics.median(time_calls(source.sum, num_rounds))
    copy_us = statistics.median(time_calls(lambda: target.copy_(source), num_rounds))
    return 1e6 * source.nbytes / read_us, 2e6 * source.nbytes / copy_us
