"""Products with packed weights beside those with the same sizes in 16 bit, from one row to many."""

# ruff: noqa: TID253 - only the command that needs a GPU imports this folder

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pagedcore.commands.bench.results import Point
from pagedcore.commands.bench.roofline.case import Shape, Work
from pagedcore.commands.bench.roofline.measure import check
from pagedcore.commands.bench.roofline.products import layer_matrices
from pagedcore.commands.bench.roofline.roofs import measure_memory
from pagedcore.commands.bench.roofline.timer import time_replays
from pagedcore.commands.bench.spread import Spread
from pagedcore.models.progress import Progress
from pagedcore_kernels import linear
from pagedcore_kernels.dispatch import packed_linear
from pagedcore_kernels.packed_weights import PackedWeights, pack_weights
from pagedcore_kernels.reference.packed_linear import dequantize

COMPILING_THREADS = 16
"""Triton's passes and the assembler run outside of Python's lock."""


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How weights are stored."""

    bits: int
    group_size: int
    has_zeros: bool
    """A zero point of each group's own, as in AWQ; else one for all, as in symmetric GPTQ."""


class Matrix:
    """Owns one matrix in both forms, in as many copies each as do not fit a cache."""

    def __init__(self, name: str, in_features: int, out_features: int, shape: Shape, form: PackedForm) -> None:
        self.name, self.in_features, self.out_features = name, in_features, out_features
        self._shape = shape
        num_sets = shape.num_sets(in_features * out_features * form.bits // 8)
        self._packed = [random_weights(in_features, out_features, form, shape.device) for _ in range(num_sets)]
        num_plain = shape.num_sets(in_features * out_features * shape.itemsize)
        self._plain = [shape.randn(out_features, in_features).mul_(in_features**-0.5) for _ in range(num_plain)]

    @property
    def sizes(self) -> str:
        return f"{self.in_features} x {self.out_features}"

    @property
    def packed_bytes(self) -> int:
        return self._packed[0].num_bytes

    def works(self, num_rows: int) -> tuple[Work, Work]:
        """The product of so many rows with packed weights, and with those in 16 bit: each as the engine makes it."""
        x = self._shape.randn(num_rows, self.in_features)
        packed = [partial(packed_linear, x, weights) for weights in self._packed]
        plain = [partial(linear, x, weight) for weight in self._plain]
        return (
            Work(packed, lambda: _product(x, dequantize(self._packed[0], torch.float32))),
            Work(plain, lambda: _product(x, self._plain[0])),
        )


def random_weights(in_features: int, out_features: int, form: PackedForm, device: str) -> PackedWeights:
    """Codes of any value; an output of normal inputs has a standard deviation of about one."""
    top = 1 << form.bits
    groups = (out_features, math.ceil(in_features / form.group_size))
    codes = torch.randint(0, top, (out_features, in_features), dtype=torch.uint8, device=device)
    scales = torch.rand(groups, device=device).add_(0.5).mul_(4 / (top * in_features**0.5)).half()
    zeros = torch.full(groups, top // 2, dtype=torch.uint8, device=device)
    if form.has_zeros:
        zeros.random_(top // 4, 3 * top // 4)
    return pack_weights(codes, scales.float(), zeros, bits=form.bits, group_size=form.group_size)


def measure_packed(shape: Shape, form: PackedForm, all_rows: Sequence[int], rounds: int, progress: Progress) -> tuple[float, list[Point]]:
    """Bytes a second that the card reads, and a point for each matrix of a layer and number of rows.

    Raises `EngineError` for a kernel whose result is wrong: nothing is timed that is.
    """
    torch.manual_seed(0)
    sizes = layer_matrices(shape)
    progress("products", 0, len(sizes) * len(all_rows))
    read_per_s, _ = measure_memory(rounds)
    points: list[Point] = []
    for name, (in_features, out_features) in sizes.items():
        torch.cuda.empty_cache()
        matrix = Matrix(name, in_features, out_features, shape, form)
        _compile(matrix, all_rows)
        for rows in all_rows:
            points.append(_measure(matrix, rows, read_per_s, rounds))
            progress("products", len(points), len(sizes) * len(all_rows))
    return read_per_s, points


def point_of(matrix: Matrix, rows: int, packed_us: Spread, plain_us: Spread, read_per_s: float) -> Point:
    """Share: what reading the packed weights would take over what the product took."""
    return {
        "matrix": matrix.name,
        "in_features": matrix.in_features,
        "out_features": matrix.out_features,
        "rows": rows,
        "us": packed_us,
        "plain_us": plain_us,
        "speed_up": plain_us.value / packed_us.value,
        "share": matrix.packed_bytes / packed_us.value * 1e6 / read_per_s,
    }


def _measure(matrix: Matrix, rows: int, read_per_s: float, num_rounds: int) -> Point:
    packed, plain = matrix.works(rows)
    check(f"{matrix.name} packed, {rows} x {matrix.sizes}", packed)
    check(f"{matrix.name} in 16 bit, {rows} x {matrix.sizes}", plain)
    estimate_us = matrix.packed_bytes / read_per_s * 1e6 + 1
    packed_us, plain_us = (Spread.median_of(time_replays(work.calls, estimate_us, num_rounds)) for work in (packed, plain))
    return point_of(matrix, rows, packed_us, plain_us, read_per_s)


def _compile(matrix: Matrix, all_rows: Sequence[int]) -> None:
    """What each number of rows launches, in threads. What fails here fails again when it is checked."""
    for work in matrix.works(1):
        work.calls[0]()
    with ThreadPoolExecutor(COMPILING_THREADS) as pool:
        for work in (work for rows in all_rows for work in matrix.works(rows)):
            pool.submit(work.calls[0])
    torch.cuda.synchronize()


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return x.float() @ weight.float().t()
