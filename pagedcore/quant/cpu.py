"""What this CPU multiplies fast, and weights repacked once into the blocked layout that oneDNN multiplies without a copy."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
from torch import Tensor

_BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})
_ROWS_HINT = 16
"""oneDNN picks the layout for about this many rows; measured best for 16 rows, and no worse for others."""
_MIN_FLOAT32_OUT_FEATURES = 2048
"""Below this a float32 product is faster in the plain layout."""


def cpu_has_bf16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether bfloat16 products run in hardware; without it they are several times slower than float32."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return not _BF16_FLAGS.isdisjoint(flags.split())


def is_x86() -> bool:
    """Whether this is the kind of CPU that the choices here were measured on."""
    return platform.machine() in ("x86_64", "AMD64")


def packing_pays(weight: Tensor) -> bool:
    """Whether `pack` makes products with this weight [out, in] faster here. Only where that was measured: x86 with oneDNN."""
    if weight.device.type != "cpu" or not is_x86() or not _has_packed_linear():
        return False
    if weight.dtype == torch.bfloat16:
        return cpu_has_bf16_units()
    return weight.dtype == torch.float32 and weight.shape[0] >= _MIN_FLOAT32_OUT_FEATURES


def pack(weight: Tensor) -> Tensor:
    """An opaque copy of a weight [out, in] for `packed_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)  # noqa: SLF001 (how torch.compile packs, too)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] times the packed weight's transpose, plus bias [out]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # noqa: SLF001


def _has_packed_linear() -> bool:
    ops = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")
