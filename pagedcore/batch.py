"""What a model sees of a step: flat tokens and an attention to call. Models import this and never the runtime.

Shape letters: T tokens of the step, S sequences, H query heads, K kv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """What queries and keys of a layer pass before they meet: an RMS norm a head where the model has one, then rotary embedding."""

    cos_sin: Tensor  # [P, D], of each position the cosines of its D / 2 pairs, then their sines
    positions: Tensor  # [T] int64, rows of cos_sin
    cos: Tensor | None  # [T, 1, D / 2], gathered once for all layers where the back-end asks for it
    sin: Tensor | None
    query_norm: Tensor | None  # [D]
    key_norm: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class ElementOrder:
    """An order of the H * D elements of a token's heads."""

    taken: Tensor  # [H * D] int32, the element that comes at each place
    places: Tensor  # [H * D] int32, the place of each element: the inverse

    @classmethod
    def of(cls, taken: Tensor) -> ElementOrder:
        return cls(taken, taken.argsort().int())


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What one layer's attention is in every step."""

    layer: int
    num_heads: int
    scale: float
    sliding_window: int | None
    """With w a token at position p sees positions p - w + 1 ... p."""
    out_order: ElementOrder | None = None
    """For a product that wants its inputs in an order of its own."""


class Attention(Protocol):
    """Attention of one step over the paged KV cache; the back-end is chosen by the runtime."""

    gathers_angles: bool
    """Whether `Rotation.cos` and `sin` are read, and not the table."""

    def attend(self, qkv: Tensor, rotation: Rotation, spec: AttentionSpec) -> Tensor:
        """Rotate queries and keys, write keys and values into the layer's cache, then attend causally.

        `qkv` is [T, H + 2 K, D], query heads first; returns [T, H * D], each token's elements in `spec.out_order`.
        """
        ...


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's tokens, all sequences one after another."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: Attention
    logits_indices: Tensor | None  # [N] int64: tokens whose logits are wanted; None: of all T, in order


class Model(Protocol):
    """A decoder with its weights."""

    vocab_size: int

    def forward(self, batch: InputBatch) -> Tensor:
        """Logits in the model's dtype, [N, V], for `batch.logits_indices`."""
        ...

    def shortened(self) -> AbstractContextManager[None]:
        """While it is open, `forward` leaves out layers that only repeat what others do: the same kernels in less time, other logits."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What one layer keeps for each token: all the runtime needs to size the cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
