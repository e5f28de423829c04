"""The device's only door: a `StepPlan` goes in, a pending `StepResult` comes out."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcore.batch import InputBatch, KVLayout, Model
from pagedcore.core.step import PendingStep, StepPlan
from pagedcore.grammar.grammars import Grammars
from pagedcore.runtime.attention import ATTENTION_BACKENDS, select_attention_backend
from pagedcore.runtime.decode_graphs import DecodeGraphs, graph_sizes
from pagedcore.runtime.graph_recorder import device_lock, give_back_memory
from pagedcore.runtime.inputs import PassInputs, Segment, build_inputs
from pagedcore.runtime.kv_cache import KVCache
from pagedcore.runtime.logprobs import token_logprobs
from pagedcore.runtime.passes import ForwardPass, split_into_passes
from pagedcore.runtime.pending import DeviceStep, FailedStep, PromptLogprobs
from pagedcore.runtime.prefill_graphs import PrefillGraphs, prefill_graph_shapes
from pagedcore.runtime.rows import RowBuffers
from pagedcore.runtime.sampler import Sampler, Samples
from pagedcore.swap.host_blocks import HostBlocks

WORKSPACE_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
"""Gathered keys and values of one attention call, unless one sequence of max_model_len needs more. On a CPU they fit its cache."""


@dataclass(frozen=True, slots=True)
class _PassOutput:
    sampled_logits: Tensor | None  # [N, V]
    prompt_logprobs: list[PromptLogprobs]


class ModelRunner:
    """Owns the weights, the KV cache, its blocks in host memory and the row buffers of one engine. Implements `pagedcore.core.step.Runner`.

    On CUDA a step is queued and `submit` returns; sampled tokens go to their rows on the device, so that the next step can be
    submitted before this one's result is read. On a CPU the step runs inside `submit`. Calls must come from one thread at a
    time; a result may be read from another.
    """

    def __init__(
        self,
        model: Model,
        layout: KVLayout,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_cache_dtype: torch.dtype | None = None,
        attention_backend: str = "auto",
    ) -> None:
        """`kv_cache_dtype` None is `dtype`."""
        self.device = torch.device(device)
        is_cuda = self.device.type == "cuda"
        self._device_lock: contextlib.AbstractContextManager[object] = device_lock(self.device) if is_cuda else contextlib.nullcontext()
        self.attention_backend = select_attention_backend(self.device, attention_backend)
        self._model: Model | None = model
        self._block_size = block_size
        self._cache = KVCache(layout, num_blocks=num_blocks, block_size=block_size, dtype=kv_cache_dtype or dtype, device=self.device)
        self._max_model_len = max_model_len
        self._workspace: Tensor | None = None
        if self.attention_backend == "torch":
            self._workspace = _allocate_workspace(layout, max_model_len, block_size, dtype, self.device)
        self._buffers = RowBuffers(max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size, device=self.device)
        self._sampler = Sampler(self._buffers, model.vocab_size)
        self._graphs: DecodeGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        self._host: HostBlocks | None = None

    def capture_graphs(self, max_num_tokens: int) -> None:
        """Record decode steps, and small steps with prompts of up to `max_num_tokens` tokens, as CUDA graphs; they are used from now on."""
        assert self._model is not None, "the runner is closed"
        sizes, num_rows = graph_sizes(self._buffers.num_rows), self._buffers.num_rows
        with self._on_device(), torch.inference_mode():
            decode = DecodeGraphs(self._model, self._cache, self._buffers, sizes=sizes, max_model_len=self._max_model_len)
            decode.capture()
            shapes, max_blocks = prefill_graph_shapes(num_rows, max_num_tokens), self._buffers.block_table.shape[1]
            prefill = PrefillGraphs(self._model, self._cache, shapes=shapes, max_blocks=max_blocks, device=self.device)
            prefill.capture()
        self._graphs, self._prefill_graphs = decode, prefill
        give_back_memory(self.device)  # what the runs before each recording have used

    def follow_grammars(self, grammars: Grammars) -> None:
        """Serve requests with `structured_outputs`, too."""
        self._sampler.follow_grammars(grammars)

    def keep_host_blocks(self, num_blocks: int) -> None:
        """Make so many blocks of host memory, in the place of those that there are; 0 is none.

        Raises RuntimeError where the memory cannot be had.
        """
        if self._host is not None:
            self._host.close()
        with self._on_device():
            self._host = HostBlocks(self._cache.data, num_blocks) if num_blocks else None

    def submit(self, plan: StepPlan) -> PendingStep:
        """Start a step. What it raises is raised by `result()` of what this returns."""
        with self._device_lock, self._on_device(), torch.inference_mode():
            try:
                return self._start(plan)
            except Exception as error:  # noqa: BLE001 - by the contract a step's failure belongs to its result
                return FailedStep(error)

    def close(self) -> None:
        """Drop weights, KV cache and buffers, and give the memory back. The runner cannot be used afterwards."""
        self.keep_host_blocks(0)
        self._model = self._graphs = self._prefill_graphs = None
        for name in ("_cache", "_workspace", "_buffers", "_sampler"):
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            give_back_memory(self.device)

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _start(self, plan: StepPlan) -> PendingStep:
        if plan.copies_out or plan.copies_in:
            assert self._host is not None, "the plan copies blocks, and there is no host memory for them"
            self._host.copy_out(plan.copies_out)
            self._host.copy_in(plan.copies_in)
        self._buffers.apply(plan)
        self._sampler.apply(plan)
        if self._graphs is not None and self._graphs.serves(plan):
            return self._decode(plan, self._graphs)
        passes = split_into_passes(plan, self._buffers)
        outputs = [self._forward(forward_pass, is_last=forward_pass is passes[-1]) for forward_pass in passes]
        sampling = [segment for forward_pass in passes for segment in forward_pass.segments if segment.samples]
        samples = self._sample(sampling, [output.sampled_logits for output in outputs if output.sampled_logits is not None])
        sampled_rows = [segment.row for segment in sampling]
        return DeviceStep(plan, sampled_rows, samples, [part for output in outputs for part in output.prompt_logprobs], self.device)

    def _decode(self, plan: StepPlan, graphs: DecodeGraphs) -> PendingStep:
        """Every row of the plan by one token. What the graph has drawn is drawn again where a row wants more than it knows of."""
        count = len(plan.rows)
        batch = self._sampler.batch_of(plan.rows)
        output = graphs.run(plan, batch)
        if batch.is_drawn_plainly:
            positions = output.positions[:count] + 1
            samples = Samples(output.token_ids[:count], output.status[:count], positions, batch.buffer_rows, None, batch)
        else:
            samples = self._sampler.sample(output.logits[:count], plan.rows, [start + 1 for start in plan.start_positions])
            self._buffers.write_sampled(samples.buffer_rows, samples.positions, samples.token_ids)
        return DeviceStep(plan, plan.rows, samples, [], self.device)

    def _forward(self, forward_pass: ForwardPass, *, is_last: bool) -> _PassOutput:
        assert self._model is not None, "the runner is closed"
        inputs = build_inputs(forward_pass.segments, forward_pass.logits_indices, self._buffers, self._block_size)
        if inputs.opened_blocks is not None and self.attention_backend == "torch":
            self._cache.open_blocks(inputs.opened_blocks)
        logits = self._logits(self._model, inputs)
        num_sampled = sum(segment.samples for segment in forward_pass.segments)
        prompt_logprobs: list[PromptLogprobs] = []
        first = num_sampled
        for segment, count in forward_pass.prompt_logprobs:
            prompt_logprobs.append(self._prompt_logprobs(segment, logits[first : first + count]))
            first += count
        sampled = logits[:num_sampled] if is_last else logits[:num_sampled].clone()  # the next pass may be a graph's, and overwrite them
        return _PassOutput(sampled if num_sampled else None, prompt_logprobs)

    def _logits(self, model: Model, inputs: PassInputs) -> Tensor:
        graphs = self._prefill_graphs
        if graphs is not None:
            shape = graphs.shape_for(inputs)
            if shape is not None:
                return graphs.run(shape, inputs)
        attention = ATTENTION_BACKENDS[self.attention_backend](inputs, self._cache, self._workspace)
        return model.forward(InputBatch(inputs.token_ids, inputs.positions, attention, inputs.logits_indices))

    def _prompt_logprobs(self, segment: Segment, logits: Tensor) -> PromptLogprobs:
        num_top = self._buffers[segment.row].request.params.prompt_logprobs or 0
        targets = self._buffers.token_ids[segment.row, segment.start + 1 : segment.start + 1 + logits.shape[0]].long()
        return PromptLogprobs(segment.row, num_top, token_logprobs(logits, targets, num_top))

    def _sample(self, segments: Sequence[Segment], logits: list[Tensor]) -> Samples | None:
        if not segments:
            return None
        all_logits = logits[0] if len(logits) == 1 else torch.cat(logits)
        samples = self._sampler.sample(all_logits, [segment.row for segment in segments], [segment.end for segment in segments])
        self._buffers.write_sampled(samples.buffer_rows, samples.positions, samples.token_ids)
        return samples


def _allocate_workspace(layout: KVLayout, max_model_len: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[slots, 2 K, D], zero; see `PagedAttention`."""
    slot_shape = (2 * layout.num_kv_heads, layout.head_dim)
    slot_bytes = slot_shape[0] * slot_shape[1] * dtype.itemsize
    longest_slots = -(-max_model_len // block_size) * block_size
    num_slots = max(longest_slots, WORKSPACE_BYTES[device.type] // slot_bytes)
    return torch.zeros(num_slots, *slot_shape, dtype=dtype, device=device)
