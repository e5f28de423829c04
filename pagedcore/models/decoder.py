"""The decoder of all covered families: what differs between them is in `ModelArchitecture`."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedcore.batch import InputBatch, KVLayout
from pagedcore.models.architecture import ModelArchitecture
from pagedcore.models.layers import DecoderLayer, StepAngles
from pagedcore.models.rope import RotaryTable
from pagedcore.quant import LinearSpec, UnquantizedLinear
from pagedcore.quant.linear import Shape
from pagedcore_kernels import add_rms_norm

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head"


class WeightSource(Protocol):
    """Where a decoder's tensors come from."""

    def read(self, name: str, shape: Shape) -> Tensor:
        """The tensor in the decoder's dtype and on its device, owned by the caller. Raises `CheckpointError` if its shape is another."""
        ...


class Decoder:
    """Owns the weights of one model, and the rotary table of positions below `max_model_len`."""

    def __init__(self, architecture: ModelArchitecture, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        self.architecture = architecture
        self.vocab_size = architecture.vocab_size
        self.dtype = dtype
        self.device = device
        self.num_weight_bytes = 0
        """Bytes of all weights on the device; tied embeddings count once, or twice where the head is a packed copy."""
        head_dim = architecture.head_dim
        self._rotary = RotaryTable(architecture.rope, head_dim=head_dim, max_model_len=max_model_len, dtype=dtype, device=device)
        self._layers = [DecoderLayer(architecture, index) for index in range(architecture.num_layers)]
        self._embedding = self._final_norm = torch.empty(0)
        self._head = UnquantizedLinear(
            LinearSpec(names=(_HEAD,), in_features=architecture.hidden_size, out_features=(architecture.vocab_size,))
        )

    @property
    def kv_layout(self) -> KVLayout:
        return self.architecture.kv_layout

    @property
    def max_model_len(self) -> int:
        """Positions at or above this have no rotary embedding."""
        return self._rotary.num_positions

    def declare(self) -> dict[str, Shape]:
        """Name and shape of each tensor that the checkpoint must hold."""
        shapes = self._declare_embedding()
        for layer in self._layers:
            shapes |= layer.declare()
        return shapes | ({} if self.architecture.tied_embeddings else self._head.declare())

    def load(self, source: WeightSource) -> None:
        """Take all weights from `source`, layer by layer, and repack them for this device. Called once."""
        tensors = self._read(source, self._declare_embedding())
        self._embedding, self._final_norm = tensors[_EMBEDDING], tensors[_FINAL_NORM]
        for layer in self._layers:
            layer.repack(self._read(source, layer.declare()))
        if self.architecture.tied_embeddings:
            self._head.repack({f"{_HEAD}.weight": self._embedding})
            self.num_weight_bytes += 0 if self._head.holds(self._embedding) else self._embedding.nbytes
        else:
            self._head.repack(self._read(source, self._head.declare()))

    def forward(self, batch: InputBatch) -> Tensor:
        """Logits in the model's dtype, [N, V], for `batch.logits_indices`."""
        angles = StepAngles(*self._rotary.at(batch.positions))
        hidden = F.embedding(batch.token_ids, self._embedding)
        residual: Tensor | None = None
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            rows = batch.logits_indices if index == last else None
            hidden, residual = layer.forward(hidden, residual, angles, batch.attention, rows)
        assert residual is not None, "a decoder has at least one layer"
        return self._head.apply(add_rms_norm(hidden, residual, self._final_norm, eps=self.architecture.rms_norm_eps))

    def _declare_embedding(self) -> dict[str, Shape]:
        hidden_size = self.architecture.hidden_size
        return {_EMBEDDING: (self.vocab_size, hidden_size), _FINAL_NORM: (hidden_size,)}

    def _read(self, source: WeightSource, shapes: dict[str, Shape]) -> dict[str, Tensor]:
        tensors = {name: source.read(name, shape) for name, shape in shapes.items()}
        self.num_weight_bytes += sum(tensor.nbytes for tensor in tensors.values())
        return tensors
