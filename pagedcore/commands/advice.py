"""What `pagedcore doctor` recommends for a device and a model: pure arithmetic, with its reasons in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pagedcore.commands.machine import Device
from pagedcore.config import BLOCK_SIZES, EngineConfig

TYPICAL_REQUEST_TOKENS = 1024
"""Prompt and output of the request that the advice is for."""

MAX_TABLE_BLOCKS = 4096
"""A longer block table a request is worth a larger block."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the arithmetic needs of a model."""

    name: str
    num_parameters: int
    kv_elements_per_token: int
    max_model_len: int
    quantization: str | None = None
    """How the checkpoint stores its matrices, as `EnginePlan.quantization` says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Settings for one device and model, and why."""

    device: str
    model: str
    block_size: int
    max_num_seqs: int
    reasons: tuple[str, ...]


EMBEDDED_SHAPE = ModelShape(
    name="SmolLM2-135M-Instruct", num_parameters=134_515_008, kv_elements_per_token=30 * 2 * 3 * 64, max_model_len=8192
)


def read_shape(folder: Path) -> ModelShape:
    """The shape in a local model folder's config.json. Raises `CheckpointError` when it is missing or describes no model for us."""
    from pagedcore.models.registry import read_architecture, read_quantization

    found, stored = read_architecture(folder), read_quantization(folder)
    attention = found.hidden_size * found.head_dim * 2 * (found.num_heads + found.num_kv_heads)
    layer = attention + 3 * found.hidden_size * found.intermediate_size + 2 * found.hidden_size
    embeddings = found.vocab_size * found.hidden_size * (1 if found.tied_embeddings else 2)
    return ModelShape(
        name=folder.name,
        num_parameters=found.num_layers * layer + embeddings + found.hidden_size,
        kv_elements_per_token=found.num_layers * 2 * found.num_kv_heads * found.head_dim,
        max_model_len=found.max_position_embeddings,
        quantization=None if stored is None else stored.description,
    )


def advise(device: Device, shape: ModelShape, *, element_bytes: int) -> Advice:
    """Block size from the context length, max_num_seqs from the memory that is left for KV blocks."""
    block_size, block_reason = _block_size(shape)
    max_num_seqs, seqs_reason = _max_num_seqs(device, shape, element_bytes)
    reasons = (block_reason, seqs_reason, *_quantization_reasons(shape, element_bytes))
    return Advice(device=device.name, model=shape.name, block_size=block_size, max_num_seqs=max_num_seqs, reasons=reasons)


def _quantization_reasons(shape: ModelShape, element_bytes: int) -> tuple[str, ...]:
    if shape.quantization is None:
        return ()
    weights = shape.num_parameters * element_bytes / GIB
    reason = (
        f"weights: {shape.quantization}, dequantized once at load into {8 * element_bytes}-bit floats, about {weights:.2f} GiB: "
        "as fast as unquantized ones, and as large."
    )
    return (reason,)


def _block_size(shape: ModelShape) -> tuple[int, str]:
    size = next((b for b in BLOCK_SIZES if b >= 16 and shape.max_model_len <= b * MAX_TABLE_BLOCKS), BLOCK_SIZES[-1])
    table = -(-shape.max_model_len // size)
    reason = (
        f"block_size={size}: prefixes are shared in steps of {size} tokens and a request leaves {size // 2} slots unused on average; "
        f"the longest request ({shape.max_model_len:,} tokens) has a table of {table:,} blocks."
    )
    return size, reason


def _max_num_seqs(device: Device, shape: ModelShape, element_bytes: int) -> tuple[int, str]:
    pool, pool_reason = _pool_bytes(device, shape, element_bytes)
    token_bytes = shape.kv_elements_per_token * element_bytes
    tokens = min(TYPICAL_REQUEST_TOKENS, shape.max_model_len)
    fitting = max(pool, 0) // (token_bytes * tokens)
    limit = EngineConfig().max_num_seqs
    chosen = min(limit, 1 << max(fitting.bit_length() - 1, 0))
    reason = (
        f"max_num_seqs={chosen}: {pool_reason} At {token_bytes / 1024:,.1f} KiB a token that is {fitting:,} requests of {tokens:,} tokens; "
        + (f"{limit} is the default limit." if chosen == limit else "a power of two below that.")
    )
    if fitting == 0:
        reason += " Not one such request fits: choose a smaller model or lower max_model_len."
    return chosen, reason


def _pool_bytes(device: Device, shape: ModelShape, element_bytes: int) -> tuple[int, str]:
    """The engine's own sizing, less what only a loaded model shows (activations, graphs)."""
    from pagedcore.runtime.memory import cpu_budget_bytes, cuda_budget_bytes

    if device.kind == "cpu":
        pool = cpu_budget_bytes(device.free_bytes, weights_bytes=0)
        return pool, f"on a CPU the KV pool is min(2 GiB, 10 % of {device.free_bytes / GIB:.1f} GiB free) = {pool / GIB:.2f} GiB."
    share = EngineConfig().gpu_memory_utilization
    weights = shape.num_parameters * element_bytes
    held = device.total_bytes - device.free_bytes
    pool = cuda_budget_bytes(device.total_bytes, held, share) - weights
    reason = (
        f"{share:g} x {device.total_bytes / GIB:.1f} GiB - {held / GIB:.1f} GiB in use - {weights / GIB:.1f} GiB of weights "
        f"= {max(pool, 0) / GIB:.1f} GiB for KV blocks."
    )
    return pool, reason
