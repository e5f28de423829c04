"""A tiny decoder with random weights, enough to tell every token's whole prefix apart. For tests of the runtime."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from pagedcore.batch import AttentionSpec, InputBatch, KVLayout, Rotation


class TinyModel:
    """Embedding, `num_layers` attentions with residuals and positions, and a head."""

    def __init__(
        self,
        *,
        vocab_size: int = 61,
        num_heads: int = 6,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        num_layers: int = 2,
        sliding_window: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.layout = KVLayout(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
        self.sliding_window = sliding_window
        self.num_heads = num_heads
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(device=device, dtype=dtype)

        hidden = num_heads * head_dim
        self.embedding = weight(vocab_size, hidden) * hidden**0.5
        self.positions = weight(4096, hidden) * hidden**0.5
        self.qkv = [weight((num_heads + 2 * num_kv_heads) * head_dim, hidden) for _ in range(num_layers)]
        self.head = weight(vocab_size, hidden) * 4
        self._poison = torch.zeros(vocab_size, 1, dtype=dtype, device=device)
        half = torch.ones(1, head_dim // 2, dtype=dtype, device=device)
        self._unturned = torch.cat((half, half * 0), dim=1)  # [1, D]

    def poison(self, token_id: int | None) -> None:
        """Give NaN logits behind this token from now on (None: behind no token), in captured graphs too."""
        self._poison.zero_()
        if token_id is not None:
            self._poison[token_id] = float("nan")

    def forward(self, batch: InputBatch) -> Tensor:
        x = self.embedding[batch.token_ids] + self.positions[batch.positions]
        for layer, qkv in enumerate(self.qkv):
            x = x + self._attend(layer, x, qkv, batch)
            x = torch.nn.functional.rms_norm(x, x.shape[-1:])
        wanted = slice(None) if batch.logits_indices is None else batch.logits_indices
        return x[wanted] @ self.head.T + self._poison[batch.token_ids[wanted]]

    def shortened(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _attend(self, layer: int, x: Tensor, qkv: Tensor, batch: InputBatch) -> Tensor:
        heads = (x @ qkv.T).view(x.shape[0], -1, self.layout.head_dim)
        spec = AttentionSpec(layer=layer, num_heads=self.num_heads, scale=self.layout.head_dim**-0.5, sliding_window=self.sliding_window)
        return batch.attention.attend(heads, self._no_rotation(x.shape[0]), spec)

    def _no_rotation(self, num_tokens: int) -> Rotation:
        """Every token at position 0: the model's own embedding tells positions apart."""
        cos, sin = self._unturned.expand(num_tokens, -1)[:, None].chunk(2, dim=-1)
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=self._unturned.device)
        return Rotation(cos_sin=self._unturned, positions=positions, cos=cos, sin=sin, query_norm=None, key_norm=None, eps=0.0)
