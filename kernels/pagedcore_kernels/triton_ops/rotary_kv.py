"""What comes between the query-key-value product of a layer and its attention: head norms, rotation, KV write, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedcore_kernels.triton_ops.attention_common import kernel_view
from pagedcore_kernels.triton_ops.launch import dependent_launch

ELEMENTS_PER_PROGRAM = 1024
MANY_TOKENS = 64


def choose_heads_per_program(num_tokens: int, head_dim: int) -> int:
    """Few heads when few tokens leave the card idle; otherwise as many as keep a program's threads busy."""
    block_d = triton.next_power_of_2(head_dim)
    return max(1, ELEMENTS_PER_PROGRAM // block_d // (1 if num_tokens >= MANY_TOKENS else 4))


def rotate_and_write_kv(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    num_heads: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values; reference: `reference.rotary_kv.rotate_and_write_kv`.

    Rows of all tensors are contiguous, other strides are free. Raises ValueError for shapes and layouts that do not fit.
    """
    _check(qkv, cos_sin, positions, slot_mapping, key_cache, value_cache, num_heads)
    if (query_norm is None) != (key_norm is None):
        raise ValueError("query_norm and key_norm come together: both or neither.")
    num_tokens, num_all_heads, head_dim = qkv.shape
    shape = (num_tokens, num_heads, head_dim)
    query = torch.empty(shape, dtype=qkv.dtype, device=qkv.device) if out is None else out
    if query.shape != shape or query.dtype != qkv.dtype or query.stride(2) != 1:
        raise ValueError(f"out is {tuple(query.shape)} {query.dtype}; it must be {shape} {qkv.dtype}, its rows contiguous.")
    if num_tokens == 0:
        return query
    heads = choose_heads_per_program(num_tokens, head_dim)
    _rotate_and_write_kernel[(num_tokens, triton.cdiv(num_all_heads, heads))](
        qkv,
        cos_sin,
        positions,
        slot_mapping,
        kernel_view(key_cache),
        kernel_view(value_cache),
        query,
        qkv if query_norm is None else query_norm,
        qkv if key_norm is None else key_norm,
        eps,
        *qkv.stride()[:2],
        cos_sin.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *query.stride()[:2],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=key_cache.shape[2],
        HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        HEADS=heads,
        BLOCK_SIZE=key_cache.shape[1],
        CACHE_LIMIT=torch.finfo(key_cache.dtype).max if key_cache.dtype.itemsize == 1 else 0.0,
        HAS_NORM=query_norm is not None,
        num_warps=2 if num_tokens >= MANY_TOKENS else 1,
        **dependent_launch(qkv),
    )
    return query


def _check(
    qkv: Tensor, cos_sin: Tensor, positions: Tensor, slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor, num_heads: int
) -> None:
    num_tokens, num_all_heads, head_dim = qkv.shape
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError(f"key_cache {tuple(key_cache.shape)} and value_cache {tuple(value_cache.shape)} must be alike.")
    if num_all_heads != num_heads + 2 * key_cache.shape[2] or head_dim != key_cache.shape[3] or head_dim % 2:
        message = f"qkv {tuple(qkv.shape)} is not {num_heads} query heads and the key and value heads of caches {tuple(key_cache.shape)}"
        raise ValueError(f"{message}, or the head dimension is odd.")
    if cos_sin.shape[1:] != (head_dim,) or cos_sin.dtype != qkv.dtype:
        raise ValueError(f"cos_sin is {tuple(cos_sin.shape)} {cos_sin.dtype}; it must be [P, {head_dim}] {qkv.dtype}.")
    if not all(x.shape == (num_tokens,) and x.dtype == torch.int64 and x.is_contiguous() for x in (positions, slot_mapping)):
        raise ValueError(f"positions and slot_mapping must be contiguous int64, one for each of {num_tokens} tokens.")
    if not qkv.stride(2) == cos_sin.stride(1) == key_cache.stride(3) == value_cache.stride(3) == 1:
        raise ValueError("The last dimension of qkv, cos_sin, key_cache and value_cache must be contiguous.")


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slot_mapping_ptr"])
def _rotate_and_write_kernel(
    qkv_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    key_cache_ptr,
    value_cache_ptr,
    query_ptr,
    query_norm_ptr,
    key_norm_ptr,
    eps,
    qkv_stride_0,
    qkv_stride_1,
    cos_sin_stride_0,
    key_stride_0,
    key_stride_1,
    key_stride_2,
    value_stride_0,
    value_stride_1,
    value_stride_2,
    query_stride_0,
    query_stride_1,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_LIMIT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """(x1 cos - x2 sin, x2 cos + x1 sin) for the halves of each query and key head, rounded where the reference rounds."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_HALF)
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (d < HALF)[None, :]
    low_ptrs = qkv_ptr + token * qkv_stride_0 + (head.to(tl.int64) * qkv_stride_1)[:, None] + d[None, :]
    low = tl.load(low_ptrs, mask=inside, other=0.0)
    high = tl.load(low_ptrs + HALF, mask=inside, other=0.0)
    cos_ptrs = cos_sin_ptr + tl.load(positions_ptr + token) * cos_sin_stride_0 + d
    cos = tl.load(cos_ptrs, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(cos_ptrs + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    x1, x2 = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / (2 * HALF) + eps)[:, None]
        x1 = _norm_weighted(x1, scale, query_norm_ptr + d, key_norm_ptr + d, head, d, NUM_HEADS, HALF, low.dtype)
        x2 = _norm_weighted(x2, scale, query_norm_ptr + HALF + d, key_norm_ptr + HALF + d, head, d, NUM_HEADS, HALF, low.dtype)
    turned_low = ((x1 * cos).to(low.dtype).to(tl.float32) - x2 * sin).to(low.dtype)
    turned_high = ((x2 * cos).to(low.dtype).to(tl.float32) + x1 * sin).to(low.dtype)

    query_ptrs = query_ptr + token * query_stride_0 + (head.to(tl.int64) * query_stride_1)[:, None] + d[None, :]
    is_query = inside & (head < NUM_HEADS)[:, None]
    tl.store(query_ptrs, turned_low, mask=is_query)
    tl.store(query_ptrs + HALF, turned_high, mask=is_query)

    slot = tl.load(slot_mapping_ptr + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    kv_head = (head - NUM_HEADS).to(tl.int64)
    is_key = inside & ((kv_head >= 0) & (kv_head < NUM_KV_HEADS) & (slot >= 0))[:, None]
    key_ptrs = key_cache_ptr + block * key_stride_0 + offset * key_stride_1 + (kv_head * key_stride_2)[:, None] + d[None, :]
    tl.store(key_ptrs, _to_cache(turned_low, key_cache_ptr.dtype.element_ty, CACHE_LIMIT), mask=is_key)
    tl.store(key_ptrs + HALF, _to_cache(turned_high, key_cache_ptr.dtype.element_ty, CACHE_LIMIT), mask=is_key)
    kv_head -= NUM_KV_HEADS
    is_value = inside & ((kv_head >= 0) & (slot >= 0))[:, None]
    value_ptrs = value_cache_ptr + block * value_stride_0 + offset * value_stride_1 + (kv_head * value_stride_2)[:, None] + d[None, :]
    tl.store(value_ptrs, _to_cache(low, value_cache_ptr.dtype.element_ty, CACHE_LIMIT), mask=is_value)
    tl.store(value_ptrs + HALF, _to_cache(high, value_cache_ptr.dtype.element_ty, CACHE_LIMIT), mask=is_value)


@triton.jit
def _norm_weighted(
    x, scale, query_norm_ptrs, key_norm_ptrs, head, d, NUM_HEADS: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr
) -> tl.tensor:
    """round(round(x * scale) * weight), the weight of query or key heads."""
    query_weight = tl.load(query_norm_ptrs, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    key_weight = tl.load(key_norm_ptrs, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    weight = tl.where((head < NUM_HEADS)[:, None], query_weight, key_weight)
    return ((x * scale).to(DTYPE).to(tl.float32) * weight).to(DTYPE).to(tl.float32)


@triton.jit
def _to_cache(x, DTYPE: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """x in the cache's dtype; one of 8 bits takes what is beyond its range as its largest, and NaN as NaN."""
    if LIMIT > 0:
        x = tl.clamp(x.to(tl.float32), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return _e4m3_codes(x) if DTYPE.is_uint8() else x.to(DTYPE)


@triton.jit
def _e4m3_codes(x) -> tl.tensor:
    """The nearest float8 e4m3 of float32 within its range, ties to even, as bytes: sign, 4 bits of exponent, 3 of mantissa."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + 0x7FFFF + (magnitude >> 20 & 1) >> 20) - (120 << 3)  # the biases are 127 and 7
    # Below 2^-6 steps are of 2^-9, which is the last bit of floats from 2^14: adding that rounds to them.
    subnormal = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True)
    code = tl.where(magnitude < 0x3C800000, subnormal & 0xF, tl.where(magnitude > 0x7F800000, 0x7F, normal))
    return (bits >> 31 << 7 | code).to(tl.uint8)
