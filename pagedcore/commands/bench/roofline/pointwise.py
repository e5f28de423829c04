"""What lies between the products: norms, the activation, rotation with the write to the cache, sampling."""

# ruff: noqa: TID253 - only the command that needs a GPU imports this folder

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagedcore.commands.bench.roofline.case import Case, Shape, Work
from pagedcore_kernels.reference.rms_norm import rms_norm as rms_norm_reference
from pagedcore_kernels.reference.rotary_kv import rotate_and_write_kv as rotate_reference
from pagedcore_kernels.reference.sample_tokens import sample_tokens as sample_reference
from pagedcore_kernels.reference.silu_mul import silu_mul as silu_reference
from pagedcore_kernels.triton_ops import activation, norms, rotary_kv, sampling

TOKENS = (128, 2048)
ROWS = (1, 128)
BLOCK_SIZE = 16
NUM_POSITIONS = 4096
EPS = 1e-6
TOP_P = 0.95


def pointwise_cases(shape: Shape, all_tokens: Sequence[int] = TOKENS, all_rows: Sequence[int] = ROWS) -> Iterator[Case]:
    heads = shape.num_heads + 2 * shape.num_kv_heads
    for tokens in all_tokens:
        work = f"{tokens:,} tokens"
        moved = 2 * tokens * shape.hidden_size * shape.itemsize
        yield Case("norm", work, "copy", moved, partial(norm, shape, tokens))
        moved = 3 * tokens * shape.intermediate_size * shape.itemsize
        yield Case("silu and multiply", work, "copy", moved, partial(silu, shape, tokens))
        moved = 2 * tokens * heads * shape.head_dim * shape.itemsize
        yield Case("rotate, write KV", work, "copy", moved, partial(rotate, shape, tokens))
    for rows in all_rows:
        moved = rows * shape.vocab_size * shape.itemsize
        for name, temperature, top_p in (("greedy", 0.0, 1.0), (f"top_p {TOP_P}", 1.0, TOP_P)):
            yield Case(f"sample, {name}", f"{rows} x {shape.vocab_size}", "read", moved, partial(sample, shape, rows, temperature, top_p))


def norm(shape: Shape, tokens: int) -> Work:
    weight = shape.randn(shape.hidden_size)
    xs = [shape.randn(tokens, shape.hidden_size) for _ in range(shape.num_sets(2 * tokens * shape.hidden_size * shape.itemsize))]
    calls = [partial(norms.rms_norm, x, weight, eps=EPS) for x in xs]
    return Work(calls, partial(rms_norm_reference, xs[0], weight, eps=EPS))


def silu(shape: Shape, tokens: int) -> Work:
    width = 2 * shape.intermediate_size
    xs = [shape.randn(tokens, width) for _ in range(shape.num_sets(tokens * width * shape.itemsize))]
    return Work([partial(activation.silu_mul, x) for x in xs], partial(silu_reference, xs[0]))


def rotate(shape: Shape, tokens: int) -> Work:
    """Into slots that no two tokens share."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    cos_sin = shape.randn(NUM_POSITIONS, shape.head_dim)
    positions = torch.randint(0, NUM_POSITIONS, (tokens,), device=shape.device)
    num_blocks = tokens // BLOCK_SIZE + 2
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=shape.device)[:tokens]
    num_sets = shape.num_sets(2 * tokens * heads * shape.head_dim * shape.itemsize)
    inputs = [(shape.randn(tokens, heads, shape.head_dim), *_pool(shape, num_blocks)) for _ in range(num_sets)]

    def call(op: Callable[..., Tensor], qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return op(qkv, cos_sin, positions, slots, keys, values, num_heads=shape.num_heads)

    return Work([partial(call, rotary_kv.rotate_and_write_kv, *each) for each in inputs], partial(call, rotate_reference, *inputs[0]))


def sample(shape: Shape, rows: int, temperature: float, top_p: float) -> Work:
    """Logits of a standard deviation of 3."""
    floats = {"temperature": temperature, "top_p": top_p, "min_p": 0.0}
    settings: dict[str, Any] = {name: torch.full((rows,), value, device=shape.device) for name, value in floats.items()}
    settings |= {name: torch.arange(rows, device=shape.device) for name in ("seeds", "output_indices")}
    settings["top_k"] = torch.zeros(rows, dtype=torch.int64, device=shape.device)
    num_sets = shape.num_sets(rows * shape.vocab_size * shape.itemsize)
    logits = [shape.randn(rows, shape.vocab_size).mul_(3) for _ in range(num_sets)]

    def call(each: Tensor) -> Tensor:
        return sampling.sample_tokens(each, **settings, may_draw=temperature > 0).token_ids

    return Work([partial(call, each) for each in logits], lambda: sample_reference(logits[0], **settings).token_ids)


def _pool(shape: Shape, num_blocks: int) -> tuple[Tensor, Tensor]:
    pool = shape.randn(num_blocks, BLOCK_SIZE, 2 * shape.num_kv_heads, shape.head_dim)
    return pool[:, :, : shape.num_kv_heads], pool[:, :, shape.num_kv_heads :]
