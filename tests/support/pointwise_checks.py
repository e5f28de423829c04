"""Checks of the pointwise kernels against their references, on any device: small under the interpreter, large on a GPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagedcore_kernels.reference import rms_norm as norm_reference
from pagedcore_kernels.reference import rotary_kv as rotary_reference
from pagedcore_kernels.reference import silu_mul as silu_reference
from pagedcore_kernels.reference import step_inputs as step_reference
from pagedcore_kernels.reference.step_inputs import DecodeInputs
from pagedcore_kernels.triton_ops import activation, norms, norms_in_order, rotary_kv, step_inputs

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Two units in the last place: both round where the reference says, but sums and quotients may differ in their last bit before."""


SAME_FRACTION = 0.95
"""Elements of 16 bits that must not differ at all: only those near the middle between two floats may."""


def draw(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)
    if expected.dtype.itemsize == 2 and expected.numel() >= 100:
        same = float((actual == expected).float().mean())
        assert same > SAME_FRACTION, f"{same:.0%} of the elements are the same: a rounding is missing or one too many"


def check_norms(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> None:
    x, residual = (draw(*shape, dtype=dtype, device=device, seed=seed) * 3 for seed in (0, 1))
    weight = draw(shape[-1], dtype=dtype, device=device, seed=2)
    before = x.clone()
    out = poisoned(shape, dtype, device)
    assert norms.rms_norm(x, weight, eps=1e-5, out=out) is out
    assert_equal(out, norm_reference.rms_norm(x, weight, eps=1e-5))
    expected_sum = residual.clone()
    expected = norm_reference.add_rms_norm(x, expected_sum, weight, eps=1e-5)
    assert_equal(norms.add_rms_norm(x, residual, weight, eps=1e-5), expected)
    assert torch.equal(residual, expected_sum)
    assert torch.equal(x, before)


def check_norms_in_order(num_rows: int, dim: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Rows at any stride, x and residual each at its own; the sum is exact, its norm up to the last bit of the quotient."""
    x, residual = ((draw(num_rows, dim + 8 * more, dtype=dtype, device=device, seed=more) * 3)[:, :dim] for more in (1, 2))
    weight = draw(dim, dtype=dtype, device=device, seed=2)
    order = torch.randperm(dim, generator=torch.Generator().manual_seed(3)).to(device, torch.int32)
    before = x.clone()
    alone, same = norms_in_order.add_rms_norm_in_order(x, None, weight, order, eps=1e-5)
    assert_equal(alone, norm_reference.rms_norm(x, weight, eps=1e-5)[:, order.long()])
    assert same is x
    expected, expected_sum = norm_reference.add_rms_norm_in_order(x, residual.clone(), weight, order, eps=1e-5)
    normed, summed = norms_in_order.add_rms_norm_in_order(x, residual, weight, order, eps=1e-5)
    assert_equal(normed, expected)
    assert torch.equal(summed, expected_sum)
    assert torch.equal(x, before)


def check_norm_of_heads(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Some heads of a wider tensor, a weight row each."""
    x = draw(num_tokens, num_heads + 3, head_dim, dtype=dtype, device=device)[:, 1 : num_heads + 1]
    weight = draw(num_heads, head_dim, dtype=dtype, device=device, seed=1)
    assert_equal(norms.rms_norm(x, weight, eps=1e-6), norm_reference.rms_norm(x, weight, eps=1e-6))


def check_silu_mul(num_rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    gate_up = draw(num_rows, 2 * width + 8, dtype=dtype, device=device)[:, : 2 * width] * 4
    out = poisoned((num_rows, width), dtype, device)
    assert activation.silu_mul(gate_up, out=out) is out
    assert_equal(out, silu_reference.silu_mul(gate_up))


def check_rotary_kv(
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    has_norm: bool,
    block_size: int = 16,
    num_blocks: int = 7,
    cache_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> None:
    """Slots in the last blocks of the pool; every third token is padding; keys lie beside values, as in the engine's cache."""
    generator = torch.Generator().manual_seed(num_tokens)
    wide = draw(num_tokens, num_heads + 2 * num_kv_heads + 1, head_dim, dtype=dtype, device=device)
    qkv = wide[:, 1:]
    cos_sin = draw(50, head_dim, dtype=dtype, device=device, seed=1)
    positions = torch.randint(0, 50, (num_tokens,), generator=generator).to(device)
    num_slots = num_blocks * block_size
    slots = num_slots - 1 - torch.randperm(min(num_slots, 4 * num_tokens), generator=generator)[:num_tokens]
    slots[2::3] = -1
    slots = slots.to(device)
    norm_weights = {}
    if has_norm:
        norms_of = enumerate(("query_norm", "key_norm"), 2)
        norm_weights = {name: draw(head_dim, dtype=dtype, device=device, seed=seed) for seed, name in norms_of}
    shape = (num_blocks, block_size, 2 * num_kv_heads, head_dim)
    cache = torch.empty(shape, dtype=cache_dtype or dtype, device=device)
    cache.view(torch.uint8).fill_(0x7F)
    caches = cache[:, :, :num_kv_heads], cache[:, :, num_kv_heads:]
    out = poisoned((num_tokens, num_heads, head_dim), dtype, device)
    options = {"num_heads": num_heads, "eps": 1e-6, **norm_weights}
    assert rotary_kv.rotate_and_write_kv(qkv, cos_sin, positions, slots, *caches, out=out, **options) is out

    first_block = int(slots.max()) // block_size if num_blocks > 1000 else 0
    first_block = max(0, first_block - 4 * num_tokens // block_size - 1) if first_block else 0
    expected = torch.empty_like(cache[first_block:])
    expected.view(torch.uint8).fill_(0x7F)
    near_slots = torch.where(slots >= 0, slots - first_block * block_size, slots)
    expected_caches = expected[:, :, :num_kv_heads], expected[:, :, num_kv_heads:]
    expected_query = rotary_reference.rotate_and_write_kv(qkv, cos_sin, positions, near_slots, *expected_caches, **options)
    assert_equal(out, expected_query)
    written = slots[slots >= 0] - first_block * block_size
    actual = cache[first_block:]
    assert_cache_equal(actual.flatten(0, 1)[written], expected.flatten(0, 1)[written])
    is_free = torch.ones(actual.shape[0] * block_size, dtype=torch.bool, device=device)
    is_free[written] = False
    assert bool((actual.view(torch.uint8).flatten(0, 1)[is_free] == 0x7F).all()), "a slot of no token was written"


def assert_cache_equal(actual: Tensor, expected: Tensor) -> None:
    if actual.dtype.itemsize > 1:
        assert_equal(actual, expected)
        return
    assert bool(expected.float().isfinite().all())
    torch.testing.assert_close(actual.float(), expected.float(), atol=2**-9, rtol=2**-3, msg="more than one step of an 8-bit float away")


def check_float8_values(dtype: torch.dtype, device: str = "cpu") -> None:
    """Every float8, the middles between two and their neighbours, what is beyond the range, infinities and NaN: bit for bit, but for
    the sign of NaN.

    They are values: keys are zeros here, whose sign depends on how the rotation is rounded.
    """
    stored = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    stored = stored[stored.isfinite()].sort().values
    middles = (stored[1:] + stored[:-1]) / 2
    far = torch.tensor([464.0, 465.0, -500.0, 6e4, math.inf, -math.inf, math.nan, 1e-7, -0.0])
    values = torch.cat((stored, middles, middles * (1 + 2**-10), middles * (1 - 2**-10), far)).to(device, dtype)
    values = torch.nn.functional.pad(values, (0, -len(values) % 64)).view(-1, 1, 64)
    num_tokens = len(values)
    qkv = torch.cat((torch.zeros_like(values).expand(-1, 2, -1), values), dim=1)
    positions = torch.arange(num_tokens, device=device)
    caches = [torch.zeros(4, 16, 2, 64, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    for op, cache in zip((rotary_kv, rotary_reference), caches, strict=True):
        cos_sin = draw(num_tokens, 64, dtype=dtype, device=device)
        op.rotate_and_write_kv(qkv, cos_sin, positions, positions, cache[:, :, :1], cache[:, :, 1:], num_heads=1)
    codes = (cache.view(torch.uint8)[:, :, 1:] for cache in caches)
    actual, expected = (torch.where(written == 0xFF, 0x7F, written) for written in codes)
    assert len(expected.unique()) == 256 - 1, "all but one NaN"
    differs = (actual != expected).flatten()
    wrong = torch.stack((actual.flatten()[differs], expected.flatten()[differs])).tolist()
    assert not bool(differs.any()), f"codes written and expected: {wrong}"


def check_decode_inputs(*, num_rows: int, rows: list[int], max_blocks: int, block_size: int, device: str = "cpu") -> None:
    """`rows` are given with padding; out tensors are wider than needed and poisoned."""
    generator = torch.Generator().manual_seed(num_rows)
    max_len = max_blocks * block_size - 1
    token_ids = torch.randint(0, 1000, (num_rows, max_len + 1), generator=generator, dtype=torch.int32).to(device)
    block_table = torch.randint(0, 2**31 - 1, (num_rows, max_blocks), generator=generator, dtype=torch.int32).to(device)
    lengths = torch.randint(1, max_len + 1, (num_rows,), generator=generator, dtype=torch.int32).to(device)
    lengths[0], lengths[-1] = 1, max_len
    active = torch.tensor(rows, device=device)
    outs = [DecodeInputs.allocate(len(rows) + 2, max_blocks, device).head(len(rows)) for _ in range(2)]
    for out in outs:
        for tensor in (out.token_ids, out.positions, out.slot_mapping, out.seq_lens, out.block_tables):
            tensor.fill_(-77)
    for op, out in zip((step_inputs, step_reference), outs, strict=True):
        op.prepare_decode_inputs(token_ids, block_table, lengths, active, block_size=block_size, out=out)
    for name in DecodeInputs.__slots__:
        assert torch.equal(getattr(outs[0], name), getattr(outs[1], name)), name
    _check_write_sampled(token_ids, lengths, active, outs[0].positions)


def _check_write_sampled(token_ids: Tensor, lengths: Tensor, rows: Tensor, positions: Tensor) -> None:
    sampled = torch.arange(100, 100 + len(rows), device=rows.device)
    positions = positions.clone()
    positions[1:2] = token_ids.shape[1] - 1
    results = []
    for op in (step_inputs, step_reference):
        tokens, lens = token_ids.clone(), lengths.clone()
        op.write_sampled(sampled, rows, positions, tokens, lens)
        results.append((tokens, lens))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert int(results[0][0][rows[0], positions[0] + 1]) == 100
