"""Device ops of pagedcore. Tensors first, keyword-only scalars after, optional `out=` last; torch is all they need."""

from __future__ import annotations

from pagedcore_kernels.dispatch import add_rms_norm, add_rms_norm_in_order, has_triton, linear, rms_norm, silu_mul, take_columns
from pagedcore_kernels.reference.attention import paged_attention
from pagedcore_kernels.reference.kv_cache import compute_slot_mapping, indexable, to_cache, write_kv
from pagedcore_kernels.reference.rotary import rotary, rotate_qkv
from pagedcore_kernels.reference.sampling import (
    add_to_logits,
    apply_penalties,
    gumbel_noise,
    keep_candidates,
    mask_tokens,
    order_candidates,
    wrap_seed,
)

__all__ = [
    "add_rms_norm",
    "add_rms_norm_in_order",
    "add_to_logits",
    "apply_penalties",
    "compute_slot_mapping",
    "gumbel_noise",
    "has_triton",
    "indexable",
    "keep_candidates",
    "linear",
    "mask_tokens",
    "order_candidates",
    "paged_attention",
    "rms_norm",
    "rotary",
    "rotate_qkv",
    "silu_mul",
    "take_columns",
    "to_cache",
    "wrap_seed",
    "write_kv",
]
