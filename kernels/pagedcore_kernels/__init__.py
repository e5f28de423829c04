"""Device ops of pagedcore. Tensors first, keyword-only scalars after, optional `out=` last; torch is all they need."""

from __future__ import annotations

from pagedcore_kernels.reference.attention import paged_attention
from pagedcore_kernels.reference.kv_cache import compute_slot_mapping, write_kv
from pagedcore_kernels.reference.rms_norm import add_rms_norm, rms_norm
from pagedcore_kernels.reference.rotary import rotary
from pagedcore_kernels.reference.sampling import (
    add_to_logits,
    apply_penalties,
    gumbel_noise,
    keep_candidates,
    order_candidates,
    wrap_seed,
)
from pagedcore_kernels.reference.silu_mul import silu_mul

__all__ = [
    "add_rms_norm",
    "add_to_logits",
    "apply_penalties",
    "compute_slot_mapping",
    "gumbel_noise",
    "keep_candidates",
    "order_candidates",
    "paged_attention",
    "rms_norm",
    "rotary",
    "silu_mul",
    "wrap_seed",
    "write_kv",
]
