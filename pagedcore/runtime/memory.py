"""How many KV blocks fit: pure arithmetic on bytes that were measured elsewhere (`probe.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedcore.batch import KVLayout
from pagedcore.config import MemoryPlan
from pagedcore.errors import ConfigError

MAX_CPU_POOL_BYTES = 2 << 30
CPU_POOL_FRACTION = 0.1
"""Of the memory that is free when the engine is built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """Bytes of one device before the KV pool is made."""

    device: str
    total_bytes: int
    held_by_others_bytes: int
    weights_bytes: int
    activations_bytes: int
    """Most bytes of a step beside weights and KV pool: activations, workspaces, buffers, the host tier's staging buffer among them, and
    what the driver holds for us."""
    graphs_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """What the user asked of the pool, resolved as far as config and model go."""

    block_size: int
    block_bytes: int
    num_kv_blocks: int | None
    """Exactly this many; None sizes the pool from the budget."""
    max_model_len: int
    """The user's limit, or the model's own."""
    is_max_model_len_auto: bool


def block_bytes(layout: KVLayout, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in every layer."""
    return 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim * block_size * dtype.itemsize


def cpu_budget_bytes(free_bytes: int, weights_bytes: int) -> int:
    """Weights, which are loaded, and a pool of min(2 GiB, 10 % of what is free)."""
    return weights_bytes + min(MAX_CPU_POOL_BYTES, int(free_bytes * CPU_POOL_FRACTION))


def cuda_budget_bytes(total_bytes: int, held_by_others_bytes: int, utilization: float) -> int:
    """Utilisation x total, minus what others held before we came."""
    return max(0, int(total_bytes * utilization) - held_by_others_bytes)


def plan_memory(measured: MeasuredMemory, budget_bytes: int, request: PoolRequest) -> MemoryPlan:
    """Give the pool all that the budget leaves, or exactly the blocks that were asked for.

    Raises `ConfigError` when they do not fit the device, or when not even one block does.
    """
    room_bytes = budget_bytes - measured.weights_bytes - measured.activations_bytes - measured.graphs_bytes
    num_blocks = request.num_kv_blocks
    if num_blocks is None:
        num_blocks = max(0, room_bytes) // request.block_bytes
        if num_blocks == 0:
            raise ConfigError(_no_room_message(measured, budget_bytes, request))
    elif num_blocks * request.block_bytes > _free_bytes(measured):
        raise ConfigError(
            f"num_kv_blocks is {num_blocks}, which needs {_gib(num_blocks * request.block_bytes)} on {measured.device}, where "
            f"{_gib(_free_bytes(measured))} are free; set num_kv_blocks to at most {_free_bytes(measured) // request.block_bytes}."
        )
    return MemoryPlan(
        device=measured.device,
        total_bytes=measured.total_bytes,
        held_by_others_bytes=measured.held_by_others_bytes,
        budget_bytes=budget_bytes,
        weights_bytes=measured.weights_bytes,
        activations_bytes=measured.activations_bytes,
        graphs_bytes=measured.graphs_bytes,
        block_bytes=request.block_bytes,
        num_blocks=num_blocks,
    )


def resolve_max_model_len(plan: MemoryPlan, request: PoolRequest) -> int:
    """The longest request that this pool serves. Auto shrinks to the pool.

    Raises `ConfigError` naming the largest workable value when the user's does not fit a pool that was sized from memory. A
    pool of an exact size is taken as meant: each request is judged when it is added.
    """
    pool_tokens = plan.num_blocks * request.block_size
    if request.max_model_len <= pool_tokens or (request.num_kv_blocks is not None and not request.is_max_model_len_auto):
        return request.max_model_len
    if request.is_max_model_len_auto:
        return pool_tokens
    raise ConfigError(
        f"max_model_len is {request.max_model_len} and the KV pool holds {pool_tokens} tokens ({plan.num_blocks} blocks of "
        f'{request.block_size}, {_gib(plan.kv_cache_bytes)}): set max_model_len to at most {pool_tokens} or to "auto", '
        f"{_how_to_get_room(plan.device)}."
    )


def _free_bytes(measured: MeasuredMemory) -> int:
    held = measured.held_by_others_bytes + measured.weights_bytes + measured.activations_bytes + measured.graphs_bytes
    return max(0, measured.total_bytes - held)


def _no_room_message(measured: MeasuredMemory, budget_bytes: int, request: PoolRequest) -> str:
    return (
        f"No KV block fits {measured.device}: the budget is {_gib(budget_bytes)}, weights take {_gib(measured.weights_bytes)}, "
        f"activations {_gib(measured.activations_bytes)}, graphs {_gib(measured.graphs_bytes)}, one block {_gib(request.block_bytes)}; "
        f"other programs hold {_gib(measured.held_by_others_bytes)} of {_gib(measured.total_bytes)}. The largest workable max_model_len "
        f"is 0 here: {_how_to_get_room(measured.device)}, or lower max_num_batched_tokens."
    )


def _how_to_get_room(device: str) -> str:
    if device.startswith("cuda"):
        return "raise gpu_memory_utilization, or set num_kv_blocks"
    return "free memory, or set num_kv_blocks"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3f} GiB"
