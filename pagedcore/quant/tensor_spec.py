"""What a layer asks of one tensor of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and kind of one tensor, as the file must hold it."""

    shape: Shape
    dtype: torch.dtype | None = None
    """How the layer wants it: None is the model's dtype, float32 keeps the exact floats of the file, int32 takes 32-bit words."""
    reason: str = "config.json"
    """What asks for this shape, for messages: such as `gptq 4-bit group 128`."""
    other_shapes: tuple[Shape, ...] = ()
    """Shapes that the file may hold instead, int32 then also as int8; the layer tells them apart."""
    dummy: Callable[[torch.Generator], Tensor] | None = None
    """Draws a stand-in on the generator's device; None draws ones for norms and a normal distribution for the rest."""
