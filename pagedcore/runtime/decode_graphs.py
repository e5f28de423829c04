"""Decode steps as CUDA graphs: inputs, model and draw of one token a row in one launch, for padded numbers of rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pagedcore.batch import InputBatch, Model
from pagedcore.core.step import StepPlan
from pagedcore.runtime.graph_recorder import GraphRecorder
from pagedcore.runtime.kv_cache import KVCache
from pagedcore.runtime.rows import RowBuffers
from pagedcore.runtime.sampling_batch import SamplingBatch
from pagedcore.runtime.shared_prefix import find_shared_prefix, min_saved_blocks, shared_graph_sizes
from pagedcore.runtime.transfer import to_device
from pagedcore.runtime.triton_attention import PagedSequences, PrefixKeys, TritonAttention
from pagedcore_kernels.reference.step_inputs import PADDING_ROW, DecodeInputs

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_STEP_ABOVE = 64


_CONTEXTS = (1024, 8192)
"""Longest contexts for which few rows have graphs of their own: a shorter bound means fewer parts to split them into."""
_MAX_SPLIT_HEADS = 256
"""Rows times kv heads above which a context is not split, whatever its length."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows that are captured: a step with fewer is padded to the next one."""
    above = range(_SIZES[-1] + _STEP_ABOVE, max_num_seqs + _STEP_ABOVE, _STEP_ABOVE)
    sizes = [size for size in (*_SIZES, *above) if size < max_num_seqs]
    return [*sizes, max_num_seqs]


@dataclass(frozen=True, slots=True)
class GraphOutput:
    """What one replay leaves, overwritten by the next one."""

    logits: Tensor  # [S, V]
    token_ids: Tensor  # [S] int64
    status: Tensor  # [S] int8
    positions: Tensor  # [S] int64, of the tokens that were computed


@dataclass(frozen=True, slots=True)
class _DrawSettings:
    """Sampling settings of S rows, as `sample_tokens` takes them; padding is greedy."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    prompt_lens: Tensor

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> _DrawSettings:
        floats = [torch.full((num_rows,), value, dtype=torch.float32, device=device) for value in (0.0, 1.0, 0.0)]
        ints = [torch.zeros(num_rows, dtype=torch.int64, device=device) for _ in range(3)]
        return cls(floats[0], ints[0], floats[1], floats[2], ints[1], ints[2])

    def head(self, num_rows: int) -> _DrawSettings:
        """The first `num_rows`, views."""
        return _DrawSettings(*(x[:num_rows] for x in (self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.prompt_lens)))

    def take(self, batch: SamplingBatch) -> None:
        """Copy the settings of `batch` to the first rows; rows behind them are greedy."""
        count = len(batch.buffer_rows)
        self.temperature[count:].zero_()
        sources = (batch.floats["temperature"], batch.top_k, batch.floats["top_p"], batch.floats["min_p"], batch.seeds, batch.prompt_lens)
        targets = (self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.prompt_lens)
        for target, source in zip(targets, sources, strict=True):
            target[:count].copy_(source)


class DecodeGraphs:
    """Owns the captured graphs of one runner, and the buffers that they read and write.

    A graph reads tokens, blocks and lengths from `buffers` by row, so that a step whose rows are those of the step before
    needs no copy from the host.
    """

    def __init__(self, model: Model, cache: KVCache, buffers: RowBuffers, *, sizes: Sequence[int], max_model_len: int) -> None:
        device = buffers.device
        self._model = model
        self._cache = cache
        self._buffers = buffers
        self._sizes = list(sizes)
        self._max_model_len = max_model_len
        largest, max_blocks = self._sizes[-1], buffers.block_table.shape[1]
        self._rows = torch.full((largest,), PADDING_ROW, dtype=torch.int64, device=device)
        self._inputs = DecodeInputs.allocate(largest, max_blocks, device)
        self._settings = _DrawSettings.allocate(largest, device)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, GraphOutput]] = {}
        """By number of rows and longest context."""
        table, lens = (torch.zeros(count, dtype=torch.int32, device=device) for count in (max_blocks, largest))
        self._prefix = PrefixKeys(table, lens, max_model_len)
        self._shared_graphs: dict[int, tuple[torch.cuda.CUDAGraph, GraphOutput]] = {}
        """By number of rows: what the rows begin with is read once for all."""
        self._shared_sizes = shared_graph_sizes(self._sizes)
        self._placed: tuple[int, tuple[int, ...]] | None = None
        """Generation and rows that the device's rows and prefix are of."""
        self._size, self._is_shared = 0, False
        self._batch: SamplingBatch | None = None

    def serves(self, plan: StepPlan) -> bool:
        """Whether every row of the plan computes and draws one token, and the rows are not too many."""
        return 0 < plan.total_num_tokens == len(plan.rows) <= self._sizes[-1] and all(plan.samples)

    def capture(self) -> None:
        """Record every size, largest first: smaller ones find their memory in its pool. Row buffers and cache stay as they are."""
        recorder = GraphRecorder(self._buffers.device, self._model.shortened)
        for size, context in self._shapes():
            self._graphs[size, context] = recorder.record(partial(self._step, size, context, None))
        for size in reversed(self._shared_sizes):
            prefix = replace(self._prefix, lens=self._prefix.lens[:size])
            self._shared_graphs[size] = recorder.record(partial(self._step, size, self._max_model_len, prefix))

    def run(self, plan: StepPlan, batch: SamplingBatch) -> GraphOutput:
        """One token of each row of the plan: computed, drawn by the settings of `batch`, and written to its row. Does not wait."""
        rows = (self._buffers.generation, tuple(plan.rows))
        if rows != self._placed:
            self._place(plan)
            self._placed = rows
        if batch is not self._batch:
            self._settings.take(batch)
            self._batch = batch
        contexts = self._contexts(self._size)
        context = contexts[bisect_left(contexts, max(plan.start_positions) + 1)]
        graph, output = self._shared_graphs[self._size] if self._is_shared else self._graphs[self._size, context]
        graph.replay()
        return output

    def _place(self, plan: StepPlan) -> None:
        """Choose the graph for these rows, and tell the device which rows they are and what they begin with.

        That stays true while the rows stay: their first blocks never change. Blocks count that are full before the step, so
        that each row keeps a key of its own.
        """
        count, device = len(plan.rows), self._buffers.device
        plain, shared = (sizes[bisect_left(sizes, count)] for sizes in (self._sizes, self._shared_sizes))
        tables = [self._buffers[row].block_ids for row in plan.rows]
        limits = [start // self._cache.block_size for start in plan.start_positions]
        prefix = find_shared_prefix(tables, limits, min_saved_blocks(shared - plain, self._cache.data[0, 0].nbytes))
        self._size, self._is_shared = (plain, False) if prefix is None else (shared, True)
        padded = (*plan.rows, *(PADDING_ROW,) * (self._size - count))
        self._rows[: self._size].copy_(to_device(padded, torch.int64, device))
        if prefix is not None:
            lens = [0] * self._size
            for index in prefix.members:
                lens[index] = prefix.num_blocks * self._cache.block_size
            self._prefix.lens[: self._size].copy_(to_device(lens, torch.int32, device))
            self._prefix.table.copy_(self._buffers.block_table[plan.rows[prefix.members[0]]])

    def _shapes(self) -> list[tuple[int, int]]:
        return [(size, context) for size in reversed(self._sizes) for context in self._contexts(size)]

    def _contexts(self, size: int) -> list[int]:
        """Bounds of the context for which graphs of this size exist, rising."""
        if size * self._cache.layout.num_kv_heads > _MAX_SPLIT_HEADS:
            return [self._max_model_len]
        return [*(context for context in _CONTEXTS if context < self._max_model_len), self._max_model_len]

    def _step(self, size: int, context: int, prefix: PrefixKeys | None) -> GraphOutput:
        from pagedcore_kernels.triton_ops.sampling import sample_tokens
        from pagedcore_kernels.triton_ops.step_inputs import prepare_decode_inputs, write_sampled

        buffers, rows = self._buffers, self._rows[:size]
        inputs, settings = self._inputs.head(size), self._settings.head(size)
        prepare_decode_inputs(buffers.token_ids, buffers.block_table, buffers.lengths, rows, block_size=self._cache.block_size, out=inputs)
        sequences = PagedSequences(
            slot_mapping=inputs.slot_mapping,
            block_tables=inputs.block_tables,
            seq_lens=inputs.seq_lens,
            max_seq_len=context,
            prefill=None,
            prefix=prefix,
        )
        attention = TritonAttention(sequences, self._cache)
        logits = self._model.forward(InputBatch(inputs.token_ids, inputs.positions, attention, None))
        drawn = sample_tokens(
            logits,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seeds=settings.seeds,
            output_indices=inputs.seq_lens.long() - settings.prompt_lens,
        )
        write_sampled(drawn.token_ids, rows, inputs.positions, buffers.token_ids, buffers.lengths)
        return GraphOutput(logits, drawn.token_ids, drawn.status, inputs.positions)
