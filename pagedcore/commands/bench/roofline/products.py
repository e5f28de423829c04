"""Products with a weight matrix of few rows, as a decode step makes them: each weight is read once."""

# ruff: noqa: TID253 - only the command that needs a GPU imports this folder

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from pagedcore.commands.bench.roofline.case import Case, Shape, Work
from pagedcore_kernels import linear

ROWS = (1, 16, 64)


def product_cases(shape: Shape, all_rows: Sequence[int] = ROWS) -> Iterator[Case]:
    """Each matrix of a layer, and that of the logits, as the engine multiplies with it: a kernel of ours or the library's."""
    matrices = {**layer_matrices(shape), "logits": (shape.hidden_size, shape.vocab_size)}
    for name, (in_features, out_features) in matrices.items():
        for rows in all_rows:
            moved = in_features * out_features * shape.itemsize
            work = f"{rows} x {in_features} x {out_features}"
            yield Case(f"linear {name}", work, "read", moved, partial(product, shape, rows, in_features, out_features))


def layer_matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the products of one layer, in their order."""
    heads = shape.num_heads * shape.head_dim
    return {
        "qkv": (shape.hidden_size, heads + 2 * shape.num_kv_heads * shape.head_dim),
        "out": (heads, shape.hidden_size),
        "gate, up": (shape.hidden_size, 2 * shape.intermediate_size),
        "down": (shape.intermediate_size, shape.hidden_size),
    }


def product(shape: Shape, rows: int, in_features: int, out_features: int) -> Work:
    num_sets = shape.num_sets(in_features * out_features * shape.itemsize)
    weights = [shape.randn(out_features, in_features).mul_(in_features**-0.5) for _ in range(num_sets)]
    x = shape.randn(rows, in_features)

    def expected() -> Tensor:
        return x.float() @ weights[0].float().t()

    return Work([partial(linear, x, weight) for weight in weights], expected)
