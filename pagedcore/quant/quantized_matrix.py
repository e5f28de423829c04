"""The one form in which every storage layout is understood: integers, scales, zero points and the group of each input."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """W[o, i] = (codes[o, i] - zeros[o, g]) * scales[o, g], where g is the group of input i."""

    codes: Tensor  # [out, in] uint8
    scales: Tensor  # [out, groups] float32, the exact floats of the checkpoint
    zeros: Tensor  # [out, groups] uint8
    bits: int
    group_of_input: Tensor | None = None
    """[in] int64; None where input i is of group i // (in / groups)."""

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1]

    @property
    def group_size(self) -> int:
        """Inputs of each group, where all groups are of one size."""
        return self.in_features // self.num_groups

    @property
    def has_equal_groups(self) -> bool:
        """Whether all groups are of one size."""
        if self.in_features % self.num_groups:
            return False
        if self.group_of_input is None:
            return True
        counts = torch.bincount(self.group_of_input, minlength=self.num_groups)
        return bool((counts == self.group_size).all())

    def with_outputs(self, order: Tensor | None) -> QuantizedMatrix:
        """The rows `order` [out] of this matrix; None is all as they stand."""
        if order is None:
            return self
        codes, scales, zeros = (part.index_select(0, order) for part in (self.codes, self.scales, self.zeros))
        return replace(self, codes=codes, scales=scales, zeros=zeros)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """W [out, in]: computed in float32, rounded once to `dtype`."""
        groups = self.group_of_input
        if groups is None:
            zeros, scales = (part.repeat_interleave(self.group_size, dim=1) for part in (self.zeros, self.scales))
        else:
            zeros, scales = self.zeros.index_select(1, groups), self.scales.index_select(1, groups)
        return ((self.codes.float() - zeros.float()) * scales).to(dtype)
