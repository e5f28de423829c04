"""The decoder of all covered families: what differs between them is in `ModelArchitecture`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedcore.batch import InputBatch, KVLayout
from pagedcore.models.architecture import ModelArchitecture
from pagedcore.models.layers import DecoderLayer, norm_for
from pagedcore.models.rope import RotaryTable
from pagedcore.quant import LinearFactory, LinearSpec, TensorSpec, UnquantizedLinear
from pagedcore.quant.linear_factory import HEAD

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"


class WeightSource(Protocol):
    """Where a decoder's tensors come from."""

    def read(self, name: str, spec: TensorSpec) -> Tensor:
        """The tensor as `spec` wants it, on the decoder's device, owned by the caller. Raises `CheckpointError` if it is another."""
        ...


class Decoder:
    """Owns the weights of one model, and the rotary table of positions below `max_model_len`."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        linears: LinearFactory | None = None,
    ) -> None:
        self.architecture = architecture
        self.vocab_size = architecture.vocab_size
        self.dtype = dtype
        self.device = device
        head_dim = architecture.head_dim
        self._rotary = RotaryTable(architecture.rope, head_dim=head_dim, max_model_len=max_model_len, dtype=dtype, device=device)
        linears = linears or LinearFactory(dtype=dtype)
        self._layers = [DecoderLayer(architecture, index, linears) for index in range(architecture.num_layers)]
        self._embedding = self._final_norm = torch.empty(0)
        self.has_tied_head = architecture.tied_embeddings and not linears.is_packed(HEAD)
        """Whether the embedding is the head, too. A quantized head has weights of its own whatever config.json says."""
        head = LinearSpec(names=(HEAD,), in_features=architecture.hidden_size, out_features=(architecture.vocab_size,))
        self._head = UnquantizedLinear(head) if self.has_tied_head else linears.make(head)

    @property
    def kv_layout(self) -> KVLayout:
        return self.architecture.kv_layout

    @property
    def max_model_len(self) -> int:
        """Positions at or above this have no rotary embedding."""
        return self._rotary.num_positions

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of all weights on the device; tied embeddings count once, or twice where the head is a packed copy."""
        is_shared = isinstance(self._head, UnquantizedLinear) and self._head.holds(self._embedding)
        head_bytes = 0 if is_shared else self._head.num_bytes
        return self._embedding.nbytes + self._final_norm.nbytes + head_bytes + sum(layer.num_bytes for layer in self._layers)

    @property
    def linear_backend(self) -> str:
        """What multiplies the matrices: "torch", or for a quantized model the names of all ways in use, joined by "+"."""
        names = {linear.backend for layer in self._layers for linear in layer.linears} | {self._head.backend}
        return "+".join(sorted(names - {UnquantizedLinear.backend})) or UnquantizedLinear.backend

    def declare(self) -> dict[str, TensorSpec]:
        """Each tensor that the checkpoint must hold, by name."""
        specs = self._declare_embedding()
        for layer in self._layers:
            specs |= layer.declare()
        return specs | ({} if self.has_tied_head else self._head.declare())

    def load(self, source: WeightSource) -> None:
        """Take all weights from `source`, layer by layer, and repack them for this device. Called once."""
        tensors = self._read(source, self._declare_embedding())
        self._embedding, self._final_norm = tensors[_EMBEDDING], tensors[_FINAL_NORM]
        for layer in self._layers:
            layer.repack(self._read(source, layer.declare()))
        if self.has_tied_head:
            self._head.repack({f"{HEAD}.weight": self._embedding})
        else:
            self._head.repack(self._read(source, self._head.declare()))

    def forward(self, batch: InputBatch) -> Tensor:
        """Logits in the model's dtype, [N, V], for `batch.logits_indices`."""
        rotation = self._rotary.at(batch.positions, eps=self.architecture.rms_norm_eps, gathers=batch.attention.gathers_angles)
        # A kernel of torch's: what wrote tables and lengths has ended before attention starts.
        hidden = F.embedding(batch.token_ids, self._embedding)
        residual: Tensor | None = None
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            rows = batch.logits_indices if index == last else None  # None again where all logits are wanted
            hidden, residual = layer.forward(hidden, residual, rotation, batch.attention, rows)
        assert residual is not None, "a decoder has at least one layer"
        normed, _ = norm_for(self._head, hidden, residual, self._final_norm, self.architecture.rms_norm_eps)
        return self._head.apply(normed)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """While it is open, `forward` runs the first layer, which has no residual, one of each kind between, and the last, in which
        tokens without logits leave.
        """
        layers = self._layers
        between: dict[Hashable, DecoderLayer] = {}
        for layer in layers[1:-1]:
            between.setdefault(layer.kind, layer)
        self._layers = list(dict.fromkeys((layers[0], *between.values(), layers[-1])))
        try:
            yield
        finally:
            self._layers = layers

    def _declare_embedding(self) -> dict[str, TensorSpec]:
        hidden_size = self.architecture.hidden_size
        return {_EMBEDDING: TensorSpec((self.vocab_size, hidden_size)), _FINAL_NORM: TensorSpec((hidden_size,))}

    @staticmethod
    def _read(source: WeightSource, specs: dict[str, TensorSpec]) -> dict[str, Tensor]:
        return {name: source.read(name, spec) for name, spec in specs.items()}
