"""What a model sees of a step: flat tokens and an attention to call. Models import this and never the runtime.

Shape letters: T tokens of the step, S sequences, H query heads, K kv heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Attention(Protocol):
    """Attention of one step over the paged KV cache; the back-end is chosen by the runtime."""

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, sliding_window: int | None = None) -> Tensor:
        """Write `key` and `value` ([T, K, D]) into the cache of `layer`, then attend causally.

        `query` is [T, H, D]; returns [T, H, D]. With a sliding window of w a token at position p sees positions p - w + 1 ... p.
        """
        ...


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's tokens, all sequences one after another."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: Attention
    logits_indices: Tensor  # [N] int64: tokens whose logits are wanted


class Model(Protocol):
    """A decoder with its weights."""

    vocab_size: int

    def forward(self, batch: InputBatch) -> Tensor:
        """Logits in the model's dtype, [N, V], for `batch.logits_indices`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What one layer keeps for each token: all the runtime needs to size the cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
