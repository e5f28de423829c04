"""Which storage each linear layer of a checkpoint has: the file's tensors decide, its config says how to read them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch

from pagedcore.errors import CheckpointError
from pagedcore.quant.checkpoint_format import CheckpointFormat, PackedLayout
from pagedcore.quant.linear import LinearMethod, LinearSpec, UnquantizedLinear
from pagedcore.quant.quantized_linear import QuantizedLinear

logger = logging.getLogger(__name__)

HEAD = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFactory:
    """Makes the linear layers of one decoder.

    A module is packed if its packed tensor is in the checkpoint, plain if its `weight` is. With random weights there is no
    checkpoint to ask, and the config's rules decide.
    """

    dtype: torch.dtype
    """Of activations, and of matrices that are multiplied dense."""
    checkpoint_format: CheckpointFormat | None = None
    present: Collection[str] | None = None
    """Names of all tensors in the checkpoint; None for random weights."""

    def make(self, spec: LinearSpec) -> LinearMethod:
        """The layer for `spec`. Raises `CheckpointError`, naming the module, where file and config contradict each other."""
        layouts = [self._layout(name) for name in spec.names]
        if all(layout is None for layout in layouts):
            return UnquantizedLinear(spec)
        return QuantizedLinear(spec, layouts, dtype=self.dtype, present=self.present)

    def is_packed(self, module: str) -> bool:
        """Whether the module is stored packed."""
        if self.checkpoint_format is None:
            return False
        if self.present is None:
            return self.checkpoint_format.layout_of(module) is not None
        return self._packed_name(self.checkpoint_format, module) in self.present

    def _layout(self, module: str) -> PackedLayout | None:
        stored = self.checkpoint_format
        if stored is None:
            return None
        by_rules = stored.layout_of(module)
        if self.present is None:
            return by_rules
        if self.is_packed(module):
            return self._layout_of_packed(stored, module, by_rules)
        if f"{module}.weight" not in self.present:
            return by_rules  # the packed tensor is missed by its name
        if by_rules is not None:
            logger.debug("%s is stored unquantized, though the config's rules would have it %s", module, stored.description)
        return None

    def _layout_of_packed(self, stored: CheckpointFormat, module: str, by_rules: PackedLayout | None) -> PackedLayout:
        assert self.present is not None, "asked about a checkpoint"
        packed, plain = self._packed_name(stored, module), f"{module}.weight"
        if plain in self.present:
            raise CheckpointError(f"The checkpoint holds both {packed} and {plain}; remove the one that is not meant.")
        if by_rules is None and module != HEAD:
            raise CheckpointError(
                f"The checkpoint holds {packed}, and its quantization config leaves {module} unquantized: correct the config's rules."
            )
        return by_rules or stored.default_layout()

    @staticmethod
    def _packed_name(stored: CheckpointFormat, module: str) -> str:
        return f"{module}.{stored.packed_suffix}"
