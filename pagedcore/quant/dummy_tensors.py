"""Stand-ins for the tensors of a packed matrix, so that random weights are as large as real ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Dummy = Callable[[torch.Generator], Tensor]

WEIGHT_STD = 0.02
"""Standard deviation of the dequantized weights, about."""


def random_words(*shape: int) -> Dummy:
    """int32 words of random bits: every packed integer is uniform."""
    return lambda generator: torch.randint(-(2**31), 2**31, shape, generator=generator, device=generator.device, dtype=torch.int32)


def constant_scales(*shape: int, bits: int, has_random_zeros: bool) -> Dummy:
    """The scale with which uniform codes, less a fixed or a uniform zero, have the wanted deviation."""
    variance = (4**bits - 1) / 12 * (2 if has_random_zeros else 1)
    return lambda generator: torch.full(shape, WEIGHT_STD / math.sqrt(variance), device=generator.device)


def shuffled_groups(in_features: int, num_groups: int) -> Dummy:
    """[in] int32: groups of equal size over a random order of inputs, the same for all matrices of so many.

    Real files have one order for the matrices that read the same inputs, which is why these can be stacked.
    """
    return lambda generator: _shuffled(in_features, generator.device) // (in_features // num_groups)


def _shuffled(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(count)
    return torch.randperm(count, generator=generator, device=device, dtype=torch.int32)
