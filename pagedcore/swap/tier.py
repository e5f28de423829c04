"""From `swap_space` to a tier of host memory, or to none where computing is quicker than copying."""

from __future__ import annotations

import logging

from pagedcore.config import EngineConfig, HostTierPlan, MemoryPlan
from pagedcore.errors import ConfigError
from pagedcore.swap.costs import COMPUTED_TOKENS, COMPUTED_TOKENS_CPU, SwappingRunner, measure_costs
from pagedcore.swap.host_blocks import num_staged_blocks

GIB = 2**30

logger = logging.getLogger(__name__)


def num_host_blocks(config: EngineConfig, block_bytes: int) -> int:
    """Blocks that `swap_space` holds. Raises `ConfigError` where it is so small that it holds none."""
    num_blocks = int(config.swap_space * GIB) // block_bytes
    if config.swap_space > 0 and num_blocks == 0:
        raise ConfigError(
            f"swap_space is {config.swap_space:g} GiB and one KV block takes {block_bytes / GIB:.6f} GiB; "
            "set swap_space to at least that, or to 0 for no host tier."
        )
    return num_blocks


def staging_bytes(config: EngineConfig, block_bytes: int) -> int:
    """Bytes of device memory through which blocks travel; 0 without a tier."""
    num_blocks = num_host_blocks(config, block_bytes)
    return num_staged_blocks(block_bytes, num_blocks) * block_bytes if num_blocks else 0


def make_host_tier(
    config: EngineConfig, runner: SwappingRunner, memory: MemoryPlan, *, max_tokens: int, free_host_bytes: int
) -> HostTierPlan | None:
    """Measure both ways to get a block back, give the runner its host blocks if copying is the quicker one, and say what was decided.

    `max_tokens` is the longest prompt of one step; the pool is taken as not yet touched. None without `swap_space`. Raises
    `ConfigError` where the host has not that much memory.
    """
    num_blocks = num_host_blocks(config, memory.block_bytes)
    if num_blocks == 0:
        return None
    is_cpu = memory.device == "cpu"
    _check_free_memory(config, free_host_bytes - (memory.kv_cache_bytes if is_cpu else 0))
    num_tokens = min(COMPUTED_TOKENS_CPU if is_cpu else COMPUTED_TOKENS, max_tokens, memory.num_blocks * config.block_size)
    try:
        costs = measure_costs(runner, num_blocks=memory.num_blocks, block_size=config.block_size, num_tokens=num_tokens)
        runner.keep_host_blocks(num_blocks if costs.is_copying_cheaper else 0)
    except RuntimeError as error:
        raise ConfigError(f"swap_space is {config.swap_space:g} GiB, which cannot be had: {error} Lower it, or set it to 0.") from error
    plan = HostTierPlan(
        num_blocks=num_blocks if costs.is_copying_cheaper else 0,
        block_bytes=memory.block_bytes,
        copy_block_s=costs.copy_s,
        compute_block_s=costs.compute_s,
    )
    logger.log(logging.INFO if plan.num_blocks else logging.WARNING, "swap_space=%g: %s", config.swap_space, describe(plan))
    return plan


def describe(plan: HostTierPlan) -> str:
    """The choice and its reason, in a sentence."""
    costs = f"copying a block there and back takes {1000 * plan.copy_block_s:.3f} ms, computing it {1000 * plan.compute_block_s:.3f} ms"
    if plan.num_blocks:
        return f"{plan.num_blocks} blocks in host memory ({plan.num_bytes / GIB:.3f} GiB); {costs}."
    return f"No host memory is used: {costs}, so what is evicted is computed again."


def _check_free_memory(config: EngineConfig, free_bytes: int) -> None:
    if config.swap_space * GIB > free_bytes:
        raise ConfigError(
            f"swap_space is {config.swap_space:g} GiB and this machine has {max(0, free_bytes) / GIB:.3f} GiB of host memory free; "
            "set swap_space lower, or to 0 for no host tier."
        )
