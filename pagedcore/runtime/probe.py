"""Measuring memory: what the device has, what others hold, and what a step of ours needs at most."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pagedcore.core.step import AdmittedRow, Runner, StepPlan
from pagedcore.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedcore.runtime.model_runner import ModelRunner

UNKNOWN_FREE_BYTES = 4 << 30
"""Taken as free where the system does not say."""

_WARM_DECODES = (1, 2, 4, 8, 16, 64, 160, 255)
"""Rows of one token of a warming step: the fewer they are, the more programs share a context, and their parts are merged."""
_WARM_CONTEXTS = (128, 256, 1024, 8192, 32768)
"""Tokens of its longest row."""
_WARM_PROMPTS = (0, 2, 3, 6, 12, 24, 48, 600)
"""Tokens of the prompt beside them: whatever number of query heads shares a kv head, these fill tiles of each size."""
_WARM_SETTINGS = (
    SamplingParams(temperature=0.0, max_tokens=None),
    SamplingParams(top_p=0.9, seed=0, max_tokens=None),
    SamplingParams(presence_penalty=0.1, seed=0, max_tokens=None),
)
"""Of its rows: the largest logit, a draw, a draw from logits that were changed, which are float32."""

CUDA_SLACK_BYTES = 128 << 20
"""For what a measured step does not show: rounding and fragmentation of the allocator, kernels that are loaded later."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device at one moment; `reserved_bytes` is what this process's allocator holds of it."""

    total_bytes: int
    free_bytes: int
    reserved_bytes: int = 0
    """Held by torch in this process: other engines, tensors of the host program."""

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes

    @property
    def outside_torch_bytes(self) -> int:
        """Other processes, and what the driver and libraries hold for this one."""
        return self.used_bytes - self.reserved_bytes


def device_memory(device: torch.device) -> DeviceMemory:
    """What `device` has now. On CUDA, gives cached memory that nobody uses back first."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return DeviceMemory(total_bytes, free_bytes, torch.cuda.memory_reserved(device))
    return _host_memory()


def profiling_plan(*, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, vocab_size: int) -> StepPlan:
    """The hungriest step: every row samples with every setting on; the first rows have all tokens that the others leave, and cached
    ones before them, which some kernels gather.

    All tables name block 0 only: the content does not matter.
    """
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    num_tokens = _profiling_tokens(num_rows, max_num_batched_tokens, max_model_len)
    ends = [min(3 * count, max_model_len) if count > 1 else max_model_len for count in num_tokens]
    params = SamplingParams(
        temperature=1.0, top_p=0.9, top_k=0, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=8, seed=0, max_tokens=None
    )
    return StepPlan(
        step_id=0,
        rows=range(num_rows),
        num_tokens=num_tokens,
        start_positions=[end - count for end, count in zip(ends, num_tokens, strict=True)],
        samples=[True] * num_rows,
        admitted=[_profiling_row(row, vocab_size, params) for row in range(num_rows)],
        total_num_tokens=sum(num_tokens),
    )


def _profiling_tokens(num_rows: int, max_num_batched_tokens: int, max_model_len: int) -> list[int]:
    spare = max_num_batched_tokens - num_rows
    num_tokens = []
    for _ in range(num_rows):
        extra = min(spare, max_model_len - 1)
        num_tokens.append(1 + extra)
        spare -= extra
    return num_tokens


def _profiling_row(row: int, vocab_size: int, params: SamplingParams) -> AdmittedRow:
    return AdmittedRow(
        row=row, request_id=f"profile-{row}", token_ids=[row % vocab_size], num_prompt_tokens=1, block_ids=[0], params=params
    )


def warming_plans(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, vocab_size: int, decodes: Iterable[tuple[int, int]] = ()
) -> Iterator[StepPlan]:
    """Steps that meet every kernel which no graph holds: from one token to many rows, short and long contexts and prompts, and without
    prompts the numbers of rows and contexts of `decodes`.

    The contexts mean nothing: all tables name block 0.
    """
    shapes = [*zip(product(_WARM_DECODES, _WARM_CONTEXTS), cycle(_WARM_PROMPTS)), *((decode, 0) for decode in decodes)]
    for ((num_decodes, context), prompt), params in zip(shapes, cycle(_WARM_SETTINGS), strict=False):
        prompts = [min(prompt, max_model_len)] if prompt else []
        counts = [1] * min(num_decodes, max_num_seqs - len(prompts)) + prompts
        rows = range(len(counts))
        if sum(counts) > max_num_batched_tokens:
            continue
        starts = [max(0, min(context, max_model_len) - counts[0]), *[0] * (len(rows) - 1)]
        admitted = [_profiling_row(row, vocab_size, params) for row in rows]
        yield StepPlan(
            step_id=0,
            rows=rows,
            num_tokens=counts,
            start_positions=starts,
            samples=[True] * len(rows),
            admitted=admitted,
            total_num_tokens=sum(counts),
        )
        yield _leaving(rows)


def _leaving(rows: Sequence[int]) -> StepPlan:
    return StepPlan(step_id=0, rows=[], num_tokens=[], start_positions=[], samples=[], released_rows=rows)


def measure_activations(runner: Runner, plan: StepPlan, weights_bytes: int, before: DeviceMemory, device: torch.device) -> int:
    """Run `plan` and say how much CUDA memory this engine needs beside its weights, in bytes. `before` was measured before it
    loaded anything.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    runner.submit(plan).result()
    runner.submit(_leaving(plan.rows)).result()
    peak_bytes = torch.cuda.max_memory_reserved(device) - before.reserved_bytes
    outside_bytes = device_memory(device).outside_torch_bytes - before.outside_torch_bytes
    return max(0, peak_bytes - weights_bytes) + max(0, outside_bytes) + CUDA_SLACK_BYTES


def measure_graphs(runner: ModelRunner, max_num_batched_tokens: int, device: torch.device) -> int:
    """Capture the graphs of `runner` and say how many bytes of CUDA memory they took."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free_bytes = torch.cuda.mem_get_info(device)[0]
    runner.capture_graphs(max_num_batched_tokens)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return max(0, free_bytes - torch.cuda.mem_get_info(device)[0])


def _host_memory() -> DeviceMemory:
    """Memory of this machine, or of this container where it has less."""
    memory = _proc_meminfo() or _sysconf_memory()
    limit = _cgroup_memory()
    if limit is None or limit.total_bytes >= memory.total_bytes:
        return memory
    return DeviceMemory(limit.total_bytes, min(limit.free_bytes, memory.free_bytes))


def _proc_meminfo() -> DeviceMemory | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return DeviceMemory(*(int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")))


def _sysconf_memory() -> DeviceMemory:
    """Systems without /proc: half of the memory is taken as free."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return DeviceMemory(UNKNOWN_FREE_BYTES, UNKNOWN_FREE_BYTES)
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return DeviceMemory(total_bytes, total_bytes // 2)


def _cgroup_memory() -> DeviceMemory | None:
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not limit.exists() or not used.exists() or (text := limit.read_text().strip()) == "max":
        return None
    return DeviceMemory(int(text), max(0, int(text) - int(used.read_text())))
