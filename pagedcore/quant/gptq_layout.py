"""How GPTQ stores one matrix."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagedcore.errors import CheckpointError
from pagedcore.quant.bit_packing import num_words, unpack_bits
from pagedcore.quant.dummy_tensors import Dummy, constant_scales, random_words, shuffled_groups
from pagedcore.quant.gptq_zeros import ZeroStorage, candidates, uniform_zeros, unpack_zeros
from pagedcore.quant.groups import count_groups, group_label
from pagedcore.quant.quantized_matrix import QuantizedMatrix
from pagedcore.quant.tensor_spec import TensorSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqLayout:
    """Integers packed along the inputs, zero points along the outputs, one scale per group and output."""

    bits: int
    group_size: int | None
    """Inputs of one group; None: all are one group."""
    has_act_order: bool
    """Quantized in the order of activations (desc_act): g_idx says which group an input is of."""
    is_symmetric: bool | None
    """Whether all zero points are 2^(bits - 1); None: the file does not say."""
    zero_storage: ZeroStorage
    """By the file's label."""
    where: str
    """The file that says so, for messages."""
    _told: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Warnings given, so that a fact of the whole file is told once and not for each matrix."""

    @property
    def description(self) -> str:
        return f"gptq {self.bits}-bit {group_label(self.group_size)}{' act-order' if self.has_act_order else ''}"

    @property
    def _middle(self) -> int:
        """Each zero point of a symmetric model."""
        return 1 << (self.bits - 1)

    def declare(self, name: str, in_features: int, out_features: int, present: Collection[str] | None) -> dict[str, TensorSpec]:
        """qweight [in / (32 / bits), out], qzeros [groups, out / (32 / bits)], scales [groups, out], g_idx [in] if there.

        Raises `CheckpointError` if the groups do not divide in_features.
        """
        num_groups = count_groups(name, in_features, out_features, self.group_size)
        words, zeros = (num_words(in_features, self.bits), out_features), (num_groups, num_words(out_features, self.bits))
        dummy_scales = constant_scales(num_groups, out_features, bits=self.bits, has_random_zeros=self.is_symmetric is False)
        specs = {
            f"{name}.qweight": self._spec(words, torch.int32, random_words(*words)),
            f"{name}.qzeros": self._spec(zeros, torch.int32, self._dummy_zeros(*zeros)),
            f"{name}.scales": self._spec((num_groups, out_features), torch.float32, dummy_scales),
        }
        if self.has_act_order if present is None else f"{name}.g_idx" in present:
            specs[f"{name}.g_idx"] = self._spec((in_features,), torch.int32, shuffled_groups(in_features, num_groups))
        return specs

    def unpack(self, name: str, in_features: int, out_features: int, tensors: Mapping[str, Tensor]) -> QuantizedMatrix:
        """The matrix. Logs a warning once if the zero points are stored otherwise than labelled, or g_idx is needed and not there.

        Raises `CheckpointError` for a g_idx out of range and for zero points that a symmetric file cannot have.
        """
        num_groups = count_groups(name, in_features, out_features, self.group_size)
        return QuantizedMatrix(
            codes=unpack_bits(tensors[f"{name}.qweight"], self.bits, in_features, dim=0).t().contiguous(),
            scales=tensors[f"{name}.scales"].float().t().contiguous(),
            zeros=self._zeros(name, out_features, tensors[f"{name}.qzeros"]).t().contiguous(),
            bits=self.bits,
            group_of_input=self._group_of_input(name, in_features, num_groups, tensors.get(f"{name}.g_idx")),
        )

    def _spec(self, shape: tuple[int, ...], dtype: torch.dtype, dummy: Dummy) -> TensorSpec:
        return TensorSpec(shape, dtype=dtype, reason=self.description, dummy=dummy)

    def _zeros(self, name: str, out_features: int, words: Tensor) -> Tensor:
        """[groups, out] uint8, read as the label says unless symmetric content shows that it is stored otherwise."""
        by_label = unpack_zeros(words, self.bits, out_features, self.zero_storage)
        if self.is_symmetric is False:
            return by_label
        for storage in candidates(self.zero_storage, self.bits):
            zeros = unpack_zeros(words, self.bits, out_features, storage)
            if bool((zeros == self._middle).all()):
                if storage is not self.zero_storage:
                    self._warn_of_label(name, storage)
                return zeros
        if self.is_symmetric:
            raise self._not_symmetric(name, by_label)
        return by_label

    def _not_symmetric(self, name: str, zeros: Tensor) -> CheckpointError:
        low, high = int(zeros.min()), int(zeros.max())
        found = str(low) if low == high else f"from {low} to {high}"
        return CheckpointError(
            f"{name}.qzeros: {self.where} says that the model is symmetric and stored as {self.zero_storage.value}, which makes each "
            f"{self.bits}-bit zero point {self._middle}; they are {found}, and no storage known makes them {self._middle}. "
            f"If the model is asymmetric, set sym to false in {self.where}."
        )

    def _warn_of_label(self, name: str, storage: ZeroStorage) -> None:
        self._tell(
            f"zero points of {storage.value}",
            f"{name}.qzeros: {self.where} labels the zero points {self.zero_storage.value}, and they are those of a symmetric model "
            f"stored as {storage.value}: they are read so, here and in the layers like it.",
        )

    def _group_of_input(self, name: str, in_features: int, num_groups: int, g_idx: Tensor | None) -> Tensor | None:
        if g_idx is None:
            self._warn_of_order(name, num_groups, "there is none")
            return None
        groups = g_idx.long()
        low, high = int(groups.min()), int(groups.max())
        if low < 0 or high >= num_groups:
            raise CheckpointError(
                f"{name}.g_idx names group {low if low < 0 else high}, and the matrix has {num_groups} groups, numbered from 0 "
                f"(in_features {in_features}, group_size {self.group_size or -1} in {self.where})."
            )
        if high == 0:
            self._warn_of_order(name, num_groups, "it is all zero")
            return None
        return None if torch.equal(groups, _groups_in_order(in_features, num_groups, groups.device)) else groups

    def _warn_of_order(self, name: str, num_groups: int, fact: str) -> None:
        if self.has_act_order and num_groups > 1:
            self._tell(
                "no order",
                f"{name}.g_idx: {self.where} says desc_act, which needs the group of each input, and {fact}: "
                f"each {self.group_size} inputs in order are read as one group, here and in the layers like it.",
            )

    def _tell(self, fact: str, message: str) -> None:
        if fact not in self._told:
            self._told.add(fact)
            logger.warning("%s", message)

    def _dummy_zeros(self, num_groups: int, num_words: int) -> Dummy:
        if self.is_symmetric is False:
            return random_words(num_groups, num_words)
        return lambda generator: uniform_zeros(self._middle, self.bits, num_words, self.zero_storage, generator.device).repeat(
            num_groups, 1
        )


def _groups_in_order(in_features: int, num_groups: int, device: torch.device) -> Tensor:
    return torch.arange(in_features, device=device) // (in_features // num_groups)
