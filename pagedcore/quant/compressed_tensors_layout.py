"""The `pack-quantized` layout of compressed-tensors: integers of a few bits with a scale a group, a zero point where asymmetric."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcore.errors import CheckpointError
from pagedcore.quant.bit_packing import num_words, unpack_bits
from pagedcore.quant.dummy_tensors import constant_scales, random_words, shuffled_groups
from pagedcore.quant.groups import count_groups, group_label
from pagedcore.quant.quantized_matrix import QuantizedMatrix
from pagedcore.quant.tensor_spec import TensorSpec

_PACKED, _SCALE, _ZERO_POINT, _G_IDX, _SHAPE = "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"
_UNSET = -1
"""What fills a g_idx that was declared and never computed."""


@dataclass(frozen=True, slots=True)
class PackQuantizedLayout:
    """Signed integers stored plus 2^(bits - 1), lowest bits first.

    `weight_packed` [out, words of in], `weight_scale` [out, groups]; `weight_zero_point` either packed along the output
    [words of out, groups] with the same offset, or, from older tools, the signed integers [out, groups] themselves.
    `weight_g_idx` [in] names the group of each input; `weight_shape` repeats [out, in].
    """

    bits: int
    group_size: int | None
    """None: one group of all inputs."""
    is_symmetric: bool
    has_act_order: bool = False
    """Whether `weight_g_idx` must be there. One that is there is followed in any case."""

    @property
    def description(self) -> str:
        order = " act-order" if self.has_act_order else ""
        return f"{self.bits}-bit {group_label(self.group_size)} {'symmetric' if self.is_symmetric else 'asymmetric'}{order}"

    def declare(self, name: str, in_features: int, out_features: int, present: Collection[str] | None) -> dict[str, TensorSpec]:
        groups = count_groups(name, in_features, out_features, self.group_size)
        every = self._every_spec(in_features, out_features, groups)
        needed = {_PACKED, _SCALE} | ({_ZERO_POINT} if not self.is_symmetric else set()) | ({_G_IDX} if self.has_act_order else set())
        return {
            f"{name}.{suffix}": spec
            for suffix, spec in every.items()
            if suffix in needed or (present is not None and f"{name}.{suffix}" in present)
        }

    def unpack(self, name: str, in_features: int, out_features: int, tensors: Mapping[str, Tensor]) -> QuantizedMatrix:
        own = {suffix: tensors[f"{name}.{suffix}"] for suffix in (_PACKED, _SCALE)}
        own |= {suffix: tensor for suffix in (_ZERO_POINT, _G_IDX, _SHAPE) if (tensor := tensors.get(f"{name}.{suffix}")) is not None}
        groups = count_groups(name, in_features, out_features, self.group_size)
        if _SHAPE in own and own[_SHAPE].tolist() != [out_features, in_features]:
            raise CheckpointError(
                f"{name}.{_SHAPE} is {own[_SHAPE].tolist()}, and config.json makes the matrix {[out_features, in_features]}; "
                "is it the config of another model?"
            )
        return QuantizedMatrix(
            codes=unpack_bits(own[_PACKED], self.bits, in_features, dim=1),
            scales=own[_SCALE],
            zeros=self._zeros(name, own.get(_ZERO_POINT), own[_SCALE]),
            bits=self.bits,
            group_of_input=self._group_of_input(name, own.get(_G_IDX), in_features, groups),
        )

    def _every_spec(self, in_features: int, out_features: int, groups: int) -> dict[str, TensorSpec]:
        reason = f"compressed-tensors {self.description}"
        packed, zero_points = (out_features, num_words(in_features, self.bits)), (num_words(out_features, self.bits), groups)
        dummy_scales = constant_scales(out_features, groups, bits=self.bits, has_random_zeros=not self.is_symmetric)
        return {
            _PACKED: TensorSpec(packed, torch.int32, reason, dummy=random_words(*packed)),
            _SCALE: TensorSpec((out_features, groups), torch.float32, reason, dummy=dummy_scales),
            _ZERO_POINT: TensorSpec(zero_points, torch.int32, reason, ((out_features, groups),), random_words(*zero_points)),
            _G_IDX: TensorSpec((in_features,), torch.int32, reason, dummy=shuffled_groups(in_features, groups)),
            _SHAPE: TensorSpec((2,), torch.int32, reason),
        }

    def _zeros(self, name: str, stored: Tensor | None, scale: Tensor) -> Tensor:
        """[out, groups] uint8."""
        middle = 1 << (self.bits - 1)
        if stored is None:
            return torch.full(scale.shape, middle, dtype=torch.uint8, device=scale.device)
        zeros = self._unpack_zeros(name, stored, scale, middle)
        if self.is_symmetric and bool((zeros != middle).any()):
            raise CheckpointError(
                f"{name}.{_ZERO_POINT} holds zero points other than 0, and the quantization config says symmetric; correct the config."
            )
        return zeros

    def _unpack_zeros(self, name: str, stored: Tensor, scale: Tensor, middle: int) -> Tensor:
        out_features, groups = scale.shape
        if tuple(stored.shape) == (num_words(out_features, self.bits), groups):
            return unpack_bits(stored, self.bits, out_features, dim=0).contiguous()
        low, high = int(stored.min()), int(stored.max())
        if low < -middle or high >= middle:
            raise CheckpointError(
                f"{name}.{_ZERO_POINT} holds zero points from {low} to {high}, and {self.bits} bits hold {-middle} to {middle - 1}; "
                "fetch the model again."
            )
        return (stored + middle).to(torch.uint8)

    def _group_of_input(self, name: str, stored: Tensor | None, in_features: int, groups: int) -> Tensor | None:
        if stored is None or bool((stored == _UNSET).all()):
            return None
        low, high = int(stored.min()), int(stored.max())
        if low < 0 or high >= groups:
            raise CheckpointError(
                f"{name}.{_G_IDX} holds groups from {low} to {high}, and the matrix has 0 to {groups - 1}; fetch the model again."
            )
        in_order = torch.arange(in_features, device=stored.device) // (in_features // groups)
        return None if torch.equal(stored.long(), in_order) else stored.long()
