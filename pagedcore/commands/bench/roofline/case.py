"""One kernel on one shape, ready to be checked and timed."""

# ruff: noqa: TID253 - only the command that needs a GPU imports this folder

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Roof = Literal["read", "copy", "matmul"]
"""What bounds a kernel: bytes that it reads, bytes that it reads and writes, or its products."""

ROTATED_BYTES = 400e6
"""Buffers of one case together: more than an L2 cache holds."""
MAX_SETS = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model that its kernels see, and where they are tried."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    dtype: torch.dtype
    device: str = "cuda"
    rotated_bytes: float = ROTATED_BYTES

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def randn(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, device=self.device, dtype=self.dtype)

    def num_sets(self, num_bytes: int) -> int:
        """Buffers to rotate among, so that no call finds the data of the one before in the L2 cache."""
        return max(1, min(MAX_SETS, math.ceil(self.rotated_bytes / num_bytes)))


@dataclass(frozen=True, slots=True)
class Work:
    """The buffers of a case: one call for each set of them, and what the first must return."""

    calls: Sequence[Callable[[], Tensor]]
    expected: Callable[[], Tensor]
    """By the plain reference; of the same shape, or of the rows that `compared` picks."""
    compared: Callable[[Tensor], Tensor] = lambda result: result

    def relative_error(self) -> float:
        """Of the first call. Of token ids the share that differs, but for one: two tokens may be as good as tied."""
        expected = self.expected()
        actual = self.compared(self.calls[0]())
        if not expected.is_floating_point():
            return max(0, int((actual != expected).sum()) - 1) / len(expected)
        return float((actual.float() - expected.float()).norm() / expected.float().norm())


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table, before it is timed."""

    kernel: str
    work: str
    roof: Roof
    amount: float
    """Bytes, or floating-point operations, of one call."""
    make: Callable[[], Work]
    captures: bool = True
    """Timed in replays of a CUDA graph; else, for calls of milliseconds, one by one."""

    @property
    def name(self) -> str:
        return f"{self.kernel}, {self.work}"
