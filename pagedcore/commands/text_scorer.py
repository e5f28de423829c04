"""Logits of every token of a text, computed the way that the engine computes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pagedcore.batch import InputBatch
from pagedcore.core.step import AdmittedRow, StepPlan
from pagedcore.models.decoder import Decoder
from pagedcore.runtime.attention import ATTENTION_BACKENDS, select_attention_backend
from pagedcore.runtime.inputs import Segment, build_inputs
from pagedcore.runtime.kv_cache import KVCache
from pagedcore.runtime.rows import RowBuffers
from pagedcore.sampling_params import SamplingParams

CHUNK_TOKENS = 256
"""Tokens of one pass: bounds the logits, one row of the vocabulary's size a token."""

_ROW = 0


class TextScorer:
    """Owns a KV cache and the row buffers for one sequence of at most `max_tokens` tokens.

    Passes are made like the engine's: chunk after chunk over the paged cache, with the attention back-end that serves. Calls
    must come from one thread at a time.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_tokens: int,
        block_size: int = 16,
        chunk_tokens: int = CHUNK_TOKENS,
        kv_cache_dtype: torch.dtype | None = None,
        attention_backend: str = "auto",
    ) -> None:
        """Allocates the cache on the model's device, in `kv_cache_dtype`, or its dtype for None.

        Raises `ConfigError` for a back-end that does not exist.
        """
        self.device = torch.device(model.device)
        self.attention_backend = select_attention_backend(self.device, attention_backend)
        self._model = model
        self._max_tokens = max_tokens
        self._block_size = block_size
        self._chunk_tokens = chunk_tokens
        layout, num_blocks = model.kv_layout, -(-max_tokens // block_size)
        cache_dtype = kv_cache_dtype or model.dtype
        self._cache = KVCache(layout, num_blocks=num_blocks, block_size=block_size, dtype=cache_dtype, device=self.device)
        workspace_shape = (num_blocks * block_size, 2 * layout.num_kv_heads, layout.head_dim)
        self._workspace = torch.zeros(workspace_shape, dtype=model.dtype, device=self.device)
        self._buffers = RowBuffers(max_num_seqs=1, max_model_len=max_tokens, block_size=block_size, device=self.device)
        self._holds_sequence = False

    def logits(self, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """Start a sequence with an empty cache; then, chunk by chunk, the logits [n, V] behind each of its tokens, in the model's dtype.

        Replaces the sequence before it, whose iterator must not be used again.
        """
        assert len(token_ids) <= self._max_tokens, f"{len(token_ids)} tokens are more than the {self._max_tokens} that the cache holds"
        self._admit(token_ids)
        for start in range(0, len(token_ids), self._chunk_tokens):
            yield self._forward(Segment(_ROW, start, min(self._chunk_tokens, len(token_ids) - start), samples=False))

    def _admit(self, token_ids: Sequence[int]) -> None:
        row = AdmittedRow(
            row=_ROW,
            request_id="text",
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            block_ids=range(-(-len(token_ids) // self._block_size)),
            params=SamplingParams(),
        )
        released = [_ROW] if self._holds_sequence else []
        self._buffers.apply(
            StepPlan(step_id=0, rows=(), num_tokens=(), start_positions=(), samples=(), admitted=[row], released_rows=released)
        )
        self._holds_sequence = True

    def _forward(self, segment: Segment) -> Tensor:
        with self._on_device(), torch.inference_mode():
            inputs = build_inputs([segment], range(segment.num_tokens), self._buffers, self._block_size)
            if inputs.opened_blocks is not None:
                self._cache.open_blocks(inputs.opened_blocks)
            attention = ATTENTION_BACKENDS[self.attention_backend](inputs, self._cache, self._workspace)
            return self._model.forward(InputBatch(inputs.token_ids, inputs.positions, attention, inputs.logits_indices))

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
