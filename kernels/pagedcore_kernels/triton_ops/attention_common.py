"""What both attention kernels share: facts of the card, how a cache slot is found, how scores are scaled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret
IS_COMPILED = tl.constexpr(not INTERPRETED)
LOG2_E = 1.4426950408889634
NO_WINDOW = 2**31 - 1
UNSEEN = tl.constexpr(-1e20)
"""The maximum of a row that has seen no key yet: below every score, far above those of keys that it must not see."""

_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227}
_SMALLEST_SHARED_KIB = 99


@dataclass(frozen=True, slots=True)
class Card:
    """What launch settings depend on. `capability` is 90 for sm_90."""

    capability: int
    num_multiprocessors: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one program may use."""
        return _SHARED_KIB.get(self.capability, _SMALLEST_SHARED_KIB) * 1024

    @property
    def has_float8(self) -> bool:
        """Whether Triton knows the type float8 e4m3 there."""
        return self.capability >= 89

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel may start while the one before it ends (programmatic dependent launch)."""
        return self.capability >= 90 and not INTERPRETED


@cache
def card_of(device: torch.device) -> Card:
    """The card of a CUDA device; a small one stands for the CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return Card(capability=80, num_multiprocessors=4)
    properties = torch.cuda.get_device_properties(device)
    return Card(properties.major * 10 + properties.minor, properties.multi_processor_count)


@dataclass(frozen=True, slots=True)
class ScoreScale:
    """Constants that turn a dot product into the exponent of a power of two, with or without a soft cap."""

    score_scale: float
    cap_scale: float

    @property
    def has_cap(self) -> bool:
        return self.cap_scale > 0

    @classmethod
    def of(cls, scale: float, key_scale: float, soft_cap: float | None) -> ScoreScale:
        """`key_scale` multiplies stored keys. Raises ValueError unless scales and cap are above zero."""
        if scale * key_scale <= 0 or (soft_cap is not None and soft_cap <= 0):
            raise ValueError(f"scale {scale}, key_scale {key_scale} and soft_cap {soft_cap} must be above 0.")
        if soft_cap is None:
            return cls(scale * key_scale * LOG2_E, 0.0)
        return cls(2 * scale * key_scale / soft_cap * LOG2_E, soft_cap * LOG2_E)


def check_inputs(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor) -> None:
    """Raises ValueError for what the kernels assume and do not find."""
    if key_cache.shape != value_cache.shape or query.shape[2] != key_cache.shape[3]:
        raise ValueError(f"Caches {tuple(key_cache.shape)}, {tuple(value_cache.shape)} and query {tuple(query.shape)} do not fit together.")
    if key_cache.stride() != value_cache.stride() or key_cache.dtype != value_cache.dtype:
        raise ValueError(f"Keys and values must lie alike: strides {key_cache.stride()}, {value_cache.stride()}, equal dtypes.")
    if query.shape[1] % key_cache.shape[2]:
        raise ValueError(f"{query.shape[1]} query heads do not divide into groups of {key_cache.shape[2]} kv heads.")
    if not query.stride(2) == key_cache.stride(3) == 1:
        raise ValueError("The last dimension of query, key_cache and value_cache must be contiguous.")
    if block_tables.dtype != torch.int32 or seq_lens.dtype != torch.int32:
        raise ValueError(f"block_tables and seq_lens must be int32, not {block_tables.dtype} and {seq_lens.dtype}.")
    if block_tables.stride(1) != 1 or seq_lens.stride(0) != 1:
        raise ValueError("Rows of block_tables, and seq_lens, must be contiguous.")


def kernel_view(cache: Tensor) -> Tensor:
    """What kernels take for a cache: its bytes where it is float8 e4m3 and Triton has no such type for the card."""
    return cache if cache.dtype != torch.float8_e4m3fn or card_of(cache.device).has_float8 else cache.view(torch.uint8)


def make_output(query: Tensor, out: Tensor | None) -> Tensor:
    """`out`, or a new tensor like the query. Raises ValueError if `out` does not fit."""
    if out is None:
        return torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if out.shape != query.shape or out.dtype != query.dtype or out.stride(2) != 1:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype}; it must be {tuple(query.shape)} {query.dtype}, its last dimension contiguous."
        )
    return out


def check_places(result: Tensor, out_places: Tensor | None) -> None:
    """Raises ValueError if `out_places` does not name a place for each element of a token's heads in `result`."""
    if out_places is None:
        return
    num_elements = result.shape[1] * result.shape[2]
    if out_places.shape != (num_elements,) or out_places.dtype != torch.int32 or not out_places.is_contiguous():
        raise ValueError(f"out_places is {tuple(out_places.shape)} {out_places.dtype}; it must be ({num_elements},) int32, contiguous.")
    if result.stride(1) != result.shape[2]:
        raise ValueError(f"out has strides {result.stride()}; with out_places the heads of a token must be contiguous.")


@triton.jit
def places_of(places_ptr, elements, mask, HAS_PLACES: tl.constexpr):
    """Where these elements of a token's heads are stored, counted from its first; places are written at load."""
    if HAS_PLACES:
        places = tl.load(places_ptr + elements, mask=mask, other=0)
    else:
        places = elements
    return places


@triton.jit
def prefetch_lines(pointers):
    """Asks for the line of 128 bytes around each pointer, into the L2 cache."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def slot_offsets(table_ptr, positions, mask, stride_b, stride_t, BLOCK_SIZE: tl.constexpr):
    """64-bit offsets of these positions' slots from a head's first element; entries behind the mask are not read."""
    block = tl.load(table_ptr + positions // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    return block * stride_b + positions % BLOCK_SIZE * stride_t


@triton.jit
def beside_cache(query, CACHE_DTYPE: tl.constexpr):
    """The query in the dtype of its products. Beside keys of 8 bits bf16 becomes fp16, which holds each of their values and is
    the one type that cards convert them to in one instruction; queries beyond its range take its largest."""
    if CACHE_DTYPE.primitive_bitwidth == 8 and query.dtype == tl.bfloat16:
        query = tl.clamp(query.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return query


@triton.jit
def widen(stored, DTYPE: tl.constexpr):
    """Loaded keys or values in DTYPE. Bytes are codes of float8 e4m3: sign, 4 bits of exponent biased by 7, 3 of mantissa."""
    if stored.dtype == tl.uint8:
        code = stored.to(tl.uint32)
        half = ((code & 0x80) << 8 | (code & 0x7F) << 7).to(tl.uint16).to(tl.float16, bitcast=True)  # its bias is 15
        return tl.where((code & 0x7F) == 0x7F, float("nan"), half * 256.0).to(DTYPE)
    return stored.to(DTYPE)


@triton.jit
def widen_early(stored, DTYPE: tl.constexpr):
    """As `widen`, before each warp has read its operand of a product, not after: values would be read byte by byte.

    The instruction does nothing. The compiler moves conversions behind the operand's read, but not over what it cannot look into.
    """
    wide = widen(stored, DTYPE)
    if stored.dtype.primitive_bitwidth == 8 and IS_COMPILED:
        pack: tl.constexpr = 32 // DTYPE.primitive_bitwidth
        wide = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [wide], dtype=wide.dtype, is_pure=False, pack=pack)
    return wide


@triton.jit
def softmax_step(dots, is_seen, maxima, score_scale, cap_scale, HAS_CAP: tl.constexpr, IS_MASKED: tl.constexpr):
    """(weights of these keys, new row maxima, what earlier weights shrink by), all powers of two; maxima are of scaled scores."""
    if HAS_CAP:
        dots = cap_scale * (1.0 - 2.0 / (tl.exp2(dots * score_scale) + 1.0))
        score_scale = 1.0
    if IS_MASKED:
        dots = tl.where(is_seen, dots, -1e30)  # far below UNSEEN, scaled too: a row that has seen no key yet has no weights
    new_maxima = tl.maximum(maxima, tl.max(dots, 1) * score_scale)
    weights = tl.exp2(dots * score_scale - new_maxima[:, None])
    return weights, new_maxima, tl.exp2(maxima - new_maxima)
