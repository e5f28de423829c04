"""Small steps with prompts in them as CUDA graphs: with few tokens the host takes longer to launch the kernels than they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from pagedcore.batch import InputBatch, Model
from pagedcore.runtime.graph_recorder import GraphRecorder
from pagedcore.runtime.inputs import PassInputs
from pagedcore.runtime.kv_cache import KVCache
from pagedcore.runtime.triton_attention import LONG_QUERIES, PagedSequences, Prefill, PrefillRun, TritonAttention

_NO_SLOT = -1
_TOKENS = (64, 128, 256, 512)
_MORE_TOKENS = (1024, 1536, 2048, 3072, 4096, 6144, 8192)
_FEW_SEQUENCES = 8
_MAX_UNSPLIT = 8192
"""Longest context of a row of one token that one program may read alone."""
_LAUNCH_FLOPS = 1e13
"""What a large card computes while the host launches one pass: beyond it the host is ahead, and a graph gains nothing."""


def max_graph_tokens(num_layer_parameters: int, max_num_tokens: int) -> int:
    """Most tokens of a pass that is worth a graph, of passes of up to `max_num_tokens`: the smaller the model, the more."""
    return min(max_num_tokens, int(_LAUNCH_FLOPS / (2 * num_layer_parameters)) // _TOKENS[0] * _TOKENS[0])


@dataclass(frozen=True, slots=True, order=True)
class PassShape:
    """Most tokens and sequences of a pass that a graph serves."""

    num_tokens: int
    num_sequences: int


def prefill_graph_shapes(max_num_seqs: int, max_num_tokens: int) -> list[PassShape]:
    """Smallest first: few sequences for single prompts, then shapes for prompts that join many rows."""
    shapes = {PassShape(tokens, min(_FEW_SEQUENCES, max_num_seqs)) for tokens in _TOKENS}
    if max_num_seqs > _FEW_SEQUENCES:
        shapes.add(PassShape(max(_TOKENS[-1], max_num_seqs + _TOKENS[0]), max_num_seqs))
    shapes |= {PassShape(tokens, max_num_seqs) for tokens in (*_MORE_TOKENS, max_num_tokens) if tokens > max(_TOKENS[-1], max_num_seqs)}
    return sorted(shape for shape in shapes if shape.num_tokens <= max_num_tokens)


class PrefillGraphs:
    """Owns the captured passes of one runner, and the tensors that they read.

    Padding tokens have no slot and belong to no sequence; padding sequences have no tokens. In shapes for many sequences the
    decode kernel serves those of one token, which come first, and the prefill kernel finds no tokens there.
    """

    def __init__(self, model: Model, cache: KVCache, *, shapes: Sequence[PassShape], max_blocks: int, device: torch.device) -> None:
        self._model = model
        self._cache = cache
        self._shapes = list(shapes)
        self._max_seq_len = max_blocks * cache.block_size
        tokens = max((shape.num_tokens for shape in shapes), default=0)
        sequences = max((shape.num_sequences for shape in shapes), default=0)
        self._token_ids, self._positions = (torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(2))
        self._slots = torch.full((tokens,), _NO_SLOT, dtype=torch.int64, device=device)
        self._logits_indices = torch.zeros(sequences, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._query_start_loc = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
        self._decode_lens = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(sequences, max_blocks, dtype=torch.int32, device=device)
        self._graphs: dict[PassShape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(self) -> None:
        """Record every shape, largest first. The cache stays as it is."""
        recorder = GraphRecorder(self._token_ids.device, self._model.shortened)
        for shape in reversed(self._shapes):
            self._graphs[shape] = recorder.record(partial(self._forward, shape))

    def shape_for(self, inputs: PassInputs) -> PassShape | None:
        """The smallest graph that serves such a pass; None also where a single token attends to a long context, which is not split here,
        and for long prompts, which may have a faster kernel outside of graphs.
        """
        counts = [last - first for first, last in pairwise(inputs.query_start_loc)]
        lengths = zip(counts, inputs.seq_lens, strict=True)
        if max(counts) >= LONG_QUERIES or any(count == 1 and seq_len > _MAX_UNSPLIT for count, seq_len in lengths):
            return None
        num_rows = max(len(inputs.seq_lens), len(inputs.logits_indices))
        fitting = (s for s in self._shapes if inputs.query_start_loc[-1] <= s.num_tokens and num_rows <= s.num_sequences)
        return next(fitting, None)

    def run(self, shape: PassShape, inputs: PassInputs) -> Tensor:
        """Logits [N, V] of the pass, overwritten by the next one. Does not wait."""
        num_tokens, num_sequences, num_logits = inputs.query_start_loc[-1], len(inputs.seq_lens), len(inputs.logits_indices)
        _fill(self._token_ids[: shape.num_tokens], inputs.token_ids, 0)
        _fill(self._positions[: shape.num_tokens], inputs.positions, 0)
        _fill(self._slots[: shape.num_tokens], inputs.slot_mapping, _NO_SLOT)
        _fill(self._logits_indices[: shape.num_sequences], inputs.logits_indices, 0)
        _fill(self._seq_lens[: shape.num_sequences], inputs.device_seq_lens, 0)
        _fill(self._query_start_loc[: shape.num_sequences + 1], inputs.device_query_start_loc, num_tokens)
        if _splits_off_decodes(shape):
            num_decodes = inputs.num_decodes
            _fill(self._decode_lens[: shape.num_sequences], inputs.device_seq_lens[:num_decodes], 0)
            self._query_start_loc[: num_decodes + 1].fill_(num_decodes)
        self._block_tables[:num_sequences].copy_(inputs.block_tables)
        graph, logits = self._graphs[shape]
        graph.replay()
        return logits[:num_logits]

    def _forward(self, shape: PassShape) -> Tensor:
        tokens, sequences = slice(shape.num_tokens), slice(shape.num_sequences)
        whole = PrefillRun(0, shape.num_sequences, shape.num_tokens)
        locations, decode_lens = self._query_start_loc[: shape.num_sequences + 1], self._decode_lens[sequences]
        num_decodes = shape.num_sequences if _splits_off_decodes(shape) else 0
        paged = PagedSequences(
            slot_mapping=self._slots[tokens],
            block_tables=self._block_tables[sequences],
            seq_lens=self._seq_lens[sequences],
            max_seq_len=self._max_seq_len,
            prefill=Prefill(locations, num_decodes, [whole], decode_lens),
        )
        attention = TritonAttention(paged, self._cache)
        batch = InputBatch(self._token_ids[tokens], self._positions[tokens], attention, self._logits_indices[sequences])
        return self._model.forward(batch)


def _splits_off_decodes(shape: PassShape) -> bool:
    return shape.num_sequences > _FEW_SEQUENCES


def _fill(target: Tensor, source: Tensor, padding: int) -> None:
    target[: len(source)].copy_(source)
    target[len(source) :].fill_(padding)
