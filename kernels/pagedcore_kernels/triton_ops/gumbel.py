"""Stateless Gumbel noise inside a kernel: the same integers as `reference.sampling.gumbel_noise`, which documents them."""

from __future__ import annotations

import triton
import triton.language as tl

APPROXIMATION_ERROR = tl.constexpr(2e-4)
"""Twice what `approximate_gumbel` may be off by, and some: its logarithms are the card's own, right to 22 bits."""
_SMALL = tl.constexpr(0.0078125)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def noise_key(seed, output_index) -> tl.tensor:
    """The 64-bit key of a row's noise at one output index."""
    return _mix_64(_mix_64(seed.to(tl.uint64)) + output_index.to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def add_gumbel(x, temperature, key, ids) -> tl.tensor:
    """x / temperature + g, g = -log(-log(1 - u)) of the key and each token id."""
    u = _uniform(key, ids)
    # log(1 - u) keeps its precision for small u when it is scaled by u over the u that 1 - u has after rounding.
    rest = 1.0 - u
    exponential = tl.where(rest == 1.0, u, -tl.log(rest) * (u / tl.maximum(1.0 - rest, 1e-10)))
    return tl.div_rn(x, temperature) - tl.log(exponential)


@triton.jit
def approximate_gumbel(key, ids, FAST: tl.constexpr) -> tl.tensor:
    """g to within APPROXIMATION_ERROR / 2, at a third of the cost: to find what is worth the exact one."""
    u = _uniform(key, ids)
    exponential = tl.where(u < _SMALL, u + 0.5 * u * u, -_LN_2 * _log2(1.0 - u, FAST))
    return -_LN_2 * _log2(exponential, FAST)


@triton.jit
def _uniform(key, ids) -> tl.tensor:
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    h = _mix_32(_mix_32(ids.to(tl.uint32) * 0x9E3779B1 + low) + high)
    u = ((h & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    return tl.minimum(u, 1.0 - 1.0 / 16777216.0)


@triton.jit
def _log2(x, FAST: tl.constexpr) -> tl.tensor:
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def _mix_64(x) -> tl.tensor:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix_32(x) -> tl.tensor:
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
