"""One decoder layer: attention and feed-forward, each behind a norm and added to the residual."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pagedcore.batch import Attention, AttentionSpec, ElementOrder, Rotation
from pagedcore.models.architecture import ModelArchitecture
from pagedcore.quant import LinearFactory, LinearMethod, LinearSpec, TensorSpec
from pagedcore_kernels import add_rms_norm, add_rms_norm_in_order, rms_norm, silu_mul


class DecoderLayer:
    """Owns the weights of one layer, query, key and value fused, gate and up fused."""

    def __init__(self, architecture: ModelArchitecture, index: int, linears: LinearFactory) -> None:
        self._prefix = f"model.layers.{index}"
        self._head_dim = architecture.head_dim
        self._eps = architecture.rms_norm_eps
        self._spec = AttentionSpec(
            layer=index,
            num_heads=architecture.num_heads,
            scale=architecture.head_dim**-0.5,
            sliding_window=architecture.sliding_windows[index],
        )
        self._has_qk_norm = architecture.qk_norm
        self._norm_names = (f"{self._prefix}.input_layernorm.weight", f"{self._prefix}.post_attention_layernorm.weight")
        self._qk_norm_names = tuple(f"{self._prefix}.self_attn.{kind}_norm.weight" for kind in "qk")
        self._hidden_size = architecture.hidden_size
        self._qkv, self._out, self._gate_up, self._down = (linears.make(spec) for spec in _specs(architecture, self._prefix))
        self._attention_norm = self._mlp_norm = torch.empty(0)
        self._query_norm: Tensor | None = None
        self._key_norm: Tensor | None = None

    @property
    def linears(self) -> Iterable[LinearMethod]:
        return self._qkv, self._out, self._gate_up, self._down

    @property
    def num_bytes(self) -> int:
        """Bytes of the layer's weights on the device."""
        places = None if self._spec.out_order is None else self._spec.out_order.places
        tensors = (self._attention_norm, self._mlp_norm, self._query_norm, self._key_norm, places)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None) + sum(linear.num_bytes for linear in self.linears)

    @property
    def kind(self) -> Hashable:
        """Layers of one kind run the same kernels. Known after `repack`."""
        return (self._spec.sliding_window, *(linear.kind for linear in self.linears))

    def declare(self) -> dict[str, TensorSpec]:
        """Each tensor of this layer in the checkpoint, by name."""
        specs = dict.fromkeys(self._norm_names, TensorSpec((self._hidden_size,)))
        if self._has_qk_norm:
            specs |= dict.fromkeys(self._qk_norm_names, TensorSpec((self._head_dim,)))
        for linear in self.linears:
            specs |= linear.declare()
        return specs

    def repack(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the declared tensors. What attention gives, and gate and up, comes in the order in which the next product wants it."""
        self._attention_norm, self._mlp_norm = (tensors[name] for name in self._norm_names)
        if self._has_qk_norm:
            self._query_norm, self._key_norm = (tensors[name] for name in self._qk_norm_names)
        for linear in (self._qkv, self._out, self._down):
            linear.repack({name: tensors[name] for name in linear.declare()})
        if self._out.input_order is not None:
            self._spec = replace(self._spec, out_order=ElementOrder.of(self._out.input_order))
        wanted = self._down.input_order
        both = None if wanted is None else torch.cat((wanted, wanted + len(wanted)))
        self._gate_up.repack({name: tensors[name] for name in self._gate_up.declare()}, output_order=both)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rotation: Rotation, attention: Attention, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Hidden state and residual [T, hidden] after this layer, to be added; the given residual is lost.

        With `rows` [N] the feed-forward part runs, and both results come, for those tokens alone.
        """
        hidden, residual = norm_for(self._qkv, hidden, residual, self._attention_norm, self._eps)
        mixed = self._attend(hidden, rotation, attention)
        if rows is not None:
            mixed, residual = mixed.index_select(0, rows), residual.index_select(0, rows)
        hidden, residual = norm_for(self._gate_up, self._out.apply(mixed), residual, self._mlp_norm, self._eps)
        return self._down.apply(silu_mul(self._gate_up.apply(hidden))), residual

    def _attend(self, hidden: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        qkv = self._qkv.apply(hidden).unflatten(-1, (-1, self._head_dim))  # [T, H + 2 K, D]
        if self._has_qk_norm:
            rotation = replace(rotation, query_norm=self._query_norm, key_norm=self._key_norm)
        return attention.attend(qkv, rotation, self._spec)


def norm_for(linear: LinearMethod, hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What `linear` reads, the norm of hidden + residual, its columns in the order that it wants; and that sum. The residual is lost."""
    if linear.input_order is not None:
        return add_rms_norm_in_order(hidden, residual, weight, linear.input_order, eps=eps)
    if residual is None:
        return rms_norm(hidden, weight, eps=eps), hidden
    return add_rms_norm(hidden, residual, weight, eps=eps), residual


def _specs(architecture: ModelArchitecture, prefix: str) -> tuple[LinearSpec, LinearSpec, LinearSpec, LinearSpec]:
    """Query-key-value, attention output, gate-up, down."""
    hidden, intermediate = architecture.hidden_size, architecture.intermediate_size
    query = architecture.num_heads * architecture.head_dim
    key = architecture.num_kv_heads * architecture.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return (
        LinearSpec(
            names=(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            in_features=hidden,
            out_features=(query, key, key),
            has_bias=architecture.qkv_bias,
        ),
        LinearSpec(names=(f"{attention}.o_proj",), in_features=query, out_features=(hidden,), has_bias=architecture.out_bias),
        LinearSpec(
            names=(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            in_features=hidden,
            out_features=(intermediate, intermediate),
            has_bias=architecture.mlp_bias,
        ),
        LinearSpec(names=(f"{mlp}.down_proj",), in_features=intermediate, out_features=(hidden,), has_bias=architecture.mlp_bias),
    )
