"""What `pagedcore doctor` recommends for a device and a model: pure arithmetic, with its reasons in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pagedcore.commands.machine import Device
from pagedcore.config import EngineConfig
from pagedcore.config_checks import BLOCK_SIZES

if TYPE_CHECKING:
    from pagedcore.quant.checkpoint_format import PackedLayout

TYPICAL_REQUEST_TOKENS = 1024
"""Prompt and output of the request that is recommended for."""

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
    num_packed_parameters: int = 0
    """Those of them that stay packed on a GPU with kernels for it."""
    packed_bytes: int = 0
    """What these take there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
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
    embeddings = found.vocab_size * found.hidden_size * (1 if found.tied_embeddings else 2)
    packed_bytes = 0 if stored is None else _packed_bytes(found.num_layer_parameters, stored.default_layout())
    return ModelShape(
        name=folder.name,
        num_parameters=found.num_layer_parameters + embeddings + found.hidden_size,
        kv_elements_per_token=found.num_layers * 2 * found.num_kv_heads * found.head_dim,
        max_model_len=found.max_position_embeddings,
        quantization=None if stored is None else stored.description,
        num_packed_parameters=found.num_layer_parameters if packed_bytes else 0,
        packed_bytes=packed_bytes,
    )


def recommend(device: Device, shape: ModelShape, *, element_bytes: int) -> Recommendation:
    """Block size from the context length, max_num_seqs from the memory that is left for KV blocks."""
    block_size, block_reason = _block_size(shape)
    max_num_seqs, seqs_reason = _max_num_seqs(device, shape, element_bytes)
    reasons = (block_reason, seqs_reason, *_quantization_reasons(device, shape, element_bytes))
    return Recommendation(device=device.name, model=shape.name, block_size=block_size, max_num_seqs=max_num_seqs, reasons=reasons)


def _quantization_reasons(device: Device, shape: ModelShape, element_bytes: int) -> tuple[str, ...]:
    if shape.quantization is None:
        return ()
    size = f"about {_weight_bytes(device, shape, element_bytes) / GIB:.2f} GiB"
    if _stays_packed(device, shape):
        return (f"weights: {shape.quantization}, multiplied as they are packed, {size} with embeddings and head in 16 bit.",)
    how = f"dequantized once at load into {8 * element_bytes}-bit floats, {size}: as fast as unquantized ones, and as large."
    return (f"weights: {shape.quantization}, {how}",)


def _packed_bytes(num_parameters: int, layout: PackedLayout) -> int:
    """With a float32 scale for each group; 0 where the kernels do not read the layout."""
    from pagedcore_kernels.packed_weights import BITS, holds_groups_of

    if layout.bits not in BITS or not (layout.group_size is None or holds_groups_of(layout.group_size)):
        return 0
    num_scales = 0 if layout.group_size is None else num_parameters // layout.group_size
    return num_parameters * layout.bits // 8 + 4 * num_scales


def _weight_bytes(device: Device, shape: ModelShape, element_bytes: int) -> int:
    if not _stays_packed(device, shape):
        return shape.num_parameters * element_bytes
    return (shape.num_parameters - shape.num_packed_parameters) * element_bytes + shape.packed_bytes


def _stays_packed(device: Device, shape: ModelShape) -> bool:
    """Whether kernels of that GPU read the matrices as they are packed: from compute capability 8.0 on."""
    return shape.packed_bytes > 0 and device.compute_capability is not None and int(device.compute_capability.split(".")[0]) >= 8


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
    weights = _weight_bytes(device, shape, element_bytes)
    held = device.total_bytes - device.free_bytes
    pool = cuda_budget_bytes(device.total_bytes, held, share) - weights
    reason = (
        f"{share:g} x {device.total_bytes / GIB:.1f} GiB - {held / GIB:.1f} GiB in use - {weights / GIB:.1f} GiB of weights "
        f"= {max(pool, 0) / GIB:.1f} GiB for KV blocks."
    )
    return pool, reason
