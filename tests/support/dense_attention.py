"""Attention over one sequence with nothing paged: all keys and values of a layer in one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedcore.batch import AttentionSpec, Rotation
from pagedcore_kernels import rotate_qkv


class DenseAttention:
    """Owns keys and values of one sequence, layer by layer; the step's tokens follow those of earlier steps."""

    gathers_angles = True

    def __init__(self) -> None:
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, qkv: Tensor, rotation: Rotation, spec: AttentionSpec) -> Tensor:
        norms = {"query_norm": rotation.query_norm, "key_norm": rotation.key_norm}
        query, key, value = rotate_qkv(qkv, rotation.cos, rotation.sin, num_heads=spec.num_heads, **norms, eps=rotation.eps)
        out = self.forward(spec.layer, query, key, value, scale=spec.scale, sliding_window=spec.sliding_window).flatten(1)
        return out if spec.out_order is None else out.index_select(1, spec.out_order.taken)

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, sliding_window: int | None = None) -> Tensor:
        if layer in self._cache:
            past_key, past_value = self._cache[layer]
            key, value = torch.cat((past_key, key)), torch.cat((past_value, value))
        self._cache[layer] = (key.clone(), value.clone())
        num_queries, num_keys, group = query.shape[0], key.shape[0], query.shape[1] // key.shape[1]
        scores = torch.einsum("qhd,khd->hqk", query.float(), key.repeat_interleave(group, dim=1).float()) * scale
        distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)[None, :]
        visible = distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, dim=1).float()).to(query.dtype)
