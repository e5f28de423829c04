"""`python -m bench.kernels.w4 [--sweep] [--shape 4096x22016] [--rows 1 64] [--bits 8] [--dtype bfloat16] [--asymmetric] [--csv FILE]`:
packed weights.

Replays of a CUDA graph over weights that are rotated over more than 260 MB, beside a 16-bit matrix in the same process: the faster of
torch's own product and the engine's. share = bytes of codes and scales / time / 4.37 TB/s (what a plain read reaches on an H200). Each
configuration is compared with a float32 product before it is timed. --sweep tries a grid of configurations; `chosen` is what the
settings pick.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from bench.kernels.linear import MAX_RELATIVE_ERROR, READ_BYTES_PER_S, ROTATED_BYTES, relative_error, time_replays
from bench.kernels.w4_results import EXPANDED, GROUP_SIZE, Measured, append, tile_name
from pagedcore_kernels.dispatch import linear
from pagedcore_kernels.packed_weights import PackedWeights
from pagedcore_kernels.triton_ops.attention_common import card_of
from pagedcore_kernels.triton_ops.dequantize import dequantize
from pagedcore_kernels.triton_ops.packed_linear import packed_linear
from pagedcore_kernels.triton_ops.packed_settings import (
    SPLITS,
    FewRowsConfig,
    ManyRowsConfig,
    PackedConfig,
    choose_packed_config,
    multiplies_packed,
)
from pagedcore_kernels.triton_ops.split_k import MAX_PARTIALS

SHAPES = ((4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 160, 256)

MIN_PROGRAMS = 80

Way = PackedConfig | str
_FEW, _MANY = FewRowsConfig, ManyRowsConfig


@dataclass(frozen=True, slots=True)
class Line:
    """One timed way of multiplying."""

    measured: Measured
    way: str
    floor_us: float
    is_chosen: bool

    def __str__(self) -> str:
        one, mark = self.measured, "chosen" if self.is_chosen else ""
        sizes = f"{one.in_features:5}->{one.out_features:<5} {one.rows:3} rows {mark:6}"
        beside = f"plain {one.plain_us:6.2f}, {one.plain_us / one.us:4.2f}x"
        return f"{sizes} {one.us:7.2f} us {self.floor_us / one.us:4.0%}; {beside} {self.way}"


class Problem:
    """A packed matrix and a plain one of that shape, each in several copies. The zero point is 2^(bits - 1), or another for each group."""

    def __init__(self, in_features: int, out_features: int, bits: int, dtype: torch.dtype, *, asymmetric: bool = False) -> None:
        self.in_features, self.out_features, self.bits, self.dtype, self.asymmetric = in_features, out_features, bits, dtype, asymmetric
        self.read_bytes = in_features * out_features * bits // 8 + in_features // GROUP_SIZE * out_features * 4
        self.copies = [self._random() for _ in range(math.ceil(ROTATED_BYTES / self.read_bytes))]
        num_plain = math.ceil(ROTATED_BYTES / (in_features * out_features * 2))
        self.plain = list(torch.empty(num_plain, out_features, in_features, dtype=dtype, device="cuda").normal_(0, 0.02))
        self.weight = dequantize(self.copies[0], torch.float32)

    def _random(self) -> PackedWeights:
        shape = (self.out_features // 64, self.in_features * self.bits // 1024, 64, 64)
        words = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda")
        scales = torch.rand(self.in_features // GROUP_SIZE, self.out_features, device="cuda") * 0.01 + 0.001
        if self.asymmetric:  # a zero point stands in the lowest 8 bits of its scale
            scales = (scales.view(torch.int32) & ~0xFF | torch.randint_like(scales, 1 << self.bits).int()).view(torch.float32)
        zero = None if self.asymmetric else 1 << (self.bits - 1)
        return PackedWeights(words, scales, self.out_features, self.in_features, GROUP_SIZE, zero, self.bits)

    def multiply(self, x: Tensor, packed: PackedWeights, way: Way, out: Tensor) -> Tensor:
        if isinstance(way, str):
            return torch.matmul(x, dequantize(packed, x.dtype).t(), out=out)
        return packed_linear(x, packed, config=way, out=out)

    def plain_us(self, x: Tensor) -> float:
        """Of a product with the 16-bit matrix, the faster way."""
        ways: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (F.linear, linear)
        return min(time_replays([partial(way, x, weight) for weight in self.plain], self.plain[0].nbytes) for way in ways)

    def chosen(self, rows: int) -> Way:
        if not multiplies_packed(rows):
            return EXPANDED
        return choose_packed_config(rows, self.copies[0], self.dtype, card_of(torch.device("cuda", 0)))

    def ways(self, rows: int) -> Iterator[Way]:
        """What a sweep tries: tiles, with the numbers of splits that fill the card once or twice and whose parts have space."""
        if rows >= 64:
            yield EXPANDED
        most_splits = max(1, MAX_PARTIALS // (rows * self.out_features))
        for config in tiles_for(rows):
            programs = self.out_features // config.block_n * (-(-rows // config.block_m) if isinstance(config, ManyRowsConfig) else 1)
            most_programs = 1400 if rows <= 16 else 560
            counts = [s for s in SPLITS if s <= most_splits and MIN_PROGRAMS <= programs * s <= most_programs]
            yield from (replace(config, splits=count) for count in counts or [most_splits])


def tiles_for(rows: int) -> list[PackedConfig]:
    if rows <= 8:
        narrow = [_FEW(64, 2), _FEW(64, 2, 4), _FEW(64, 2, 5), _FEW(64, 2, max_registers=128)]
        return [*narrow, _FEW(128, 4), _FEW(128, 2)]
    if rows <= 16:
        limited = [_FEW(64, 2, max_registers=168), *(_FEW(64, 2, max_registers=most, block_m=16) for most in (168, 200))]
        narrow = [*limited, _FEW(64, 2, 4), _FEW(64, 2, 5)]
        wide = [_FEW(128, 4, max_registers=168), _FEW(128, 2), _FEW(256, 4)]
        whole = [_MANY(16, *tile) for tile in ((64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3))]
        return [*narrow, *wide, *(_FEW(*tile, block_m=16) for tile in ((64, 4), (128, 4), (128, 8))), *whole]
    if rows <= 32:
        tiles = ((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (256, 32, 4, 3), (128, 64, 8, 3), (256, 32, 8, 3))
        return [_MANY(32, *tile) for tile in tiles]
    if rows <= 64:
        narrow = ((64, 32, 4, 3), (64, 32, 4, 4), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4))
        wide = ((128, 32, 4, 3), (128, 64, 4, 2), (128, 32, 8, 3), (128, 64, 8, 2), (256, 32, 4, 3))
        return [_MANY(64, *tile) for tile in (*narrow, *wide)]
    tiles = ((128, 32, 8, 3), (128, 32, 8, 2), (128, 32, 4, 2), (128, 32, 4, 3), (64, 32, 4, 2), (64, 32, 4, 3), (256, 32, 8, 3))
    narrow = ((128, 32, 8, 3), (128, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 2), (128, 64, 8, 3))
    several = [*(_MANY(128, *tile) for tile in (*tiles, (64, 64, 4, 2), (64, 64, 4, 3))), *(_MANY(64, *tile) for tile in narrow)]
    if rows <= 128:
        return several
    return several + [_MANY(256, *tile) for tile in ((128, 32, 8, 3), (128, 32, 8, 2), (128, 16, 8, 4), (64, 32, 4, 3), (64, 16, 4, 4))]


@dataclass
class Report:
    """Owns the lines so far."""

    rows: list[int]
    sweep: bool
    lines: list[Line] = field(default_factory=list)

    def bench(self, problem: Problem) -> None:
        inputs = {rows: torch.randn(rows, problem.in_features, device="cuda").to(problem.dtype) for rows in self.rows}
        for rows, x in inputs.items():
            expected = x.float() @ problem.weight.t()
            plain_us = problem.plain_us(x)
            chosen = problem.chosen(rows)
            ways = list(dict.fromkeys([chosen, *(problem.ways(rows) if self.sweep else ())]))
            lines = [line for way in ways if (line := attempt(problem, x, expected, way, plain_us, is_chosen=way == chosen)) is not None]
            for line in sorted(lines, key=lambda line: (not line.is_chosen, line.measured.us))[: 5 if self.sweep else 1]:
                print(line, flush=True)
            self.lines += lines


def attempt(problem: Problem, x: Tensor, expected: Tensor, way: Way, plain_us: float, *, is_chosen: bool) -> Line | None:
    """None, and a line that says so, for a way that the card refuses or that errs."""
    out = torch.full(expected.shape, float("nan"), dtype=x.dtype, device=x.device)
    sizes = (problem.in_features, problem.out_features, x.shape[0])
    try:
        error = relative_error(problem.multiply(x, problem.copies[0], way, out), expected)
        if not error < MAX_RELATIVE_ERROR:
            print(f"WRONG: {sizes} {way}: relative error {error}")
            return None
        calls: list[Callable[[], object]] = [lambda c=c: problem.multiply(x, c, way, out) for c in problem.copies]
        us = time_replays(calls, problem.read_bytes)
    except (RuntimeError, triton.runtime.errors.OutOfResources) as refused:
        print(f"{sizes} {way}: {str(refused).splitlines()[0][:160]}")
        return None
    tile, splits = (EXPANDED, 1) if isinstance(way, str) else (tile_name(way), way.splits)
    measured = Measured(problem.bits, str(x.dtype).removeprefix("torch."), problem.asymmetric, *sizes, tile, splits, us, plain_us)
    return Line(measured, repr(way), problem.read_bytes / READ_BYTES_PER_S * 1e6, is_chosen)


def compile_all(problems: list[Problem], rows: list[int], sweep: bool) -> None:
    """In threads: Triton's passes and the assembler run outside of Python's lock. What fails here fails again, and is named, later."""
    with ThreadPoolExecutor(16) as pool:
        for problem in problems:
            for count in rows:
                x = torch.zeros(count, problem.in_features, dtype=problem.dtype, device="cuda")
                out = torch.empty(count, problem.out_features, dtype=problem.dtype, device="cuda")
                pool.submit(linear, x, problem.plain[0])
                for way in dict.fromkeys([problem.chosen(count), *(problem.ways(count) if sweep else ())]):
                    pool.submit(problem.multiply, x, problem.copies[0], way, out)
    torch.cuda.synchronize()


def shape(text: str) -> tuple[int, int]:
    in_features, out_features = text.split("x")
    return int(in_features), int(out_features)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="append one line for each result to this file")
    parser.add_argument("--sweep", action="store_true", help="try a grid of configurations for each shape")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--asymmetric", action="store_true", help="a zero point of its own for each group, as AWQ has")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--shape", type=shape, nargs="*", default=list(SHAPES), metavar="INxOUT", help="sizes of the matrices")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS), help="how many rows x has")
    args = parser.parse_args()
    torch.manual_seed(0)
    started = time.monotonic()
    problems = [Problem(*sizes, args.bits, getattr(torch, args.dtype), asymmetric=args.asymmetric) for sizes in args.shape]
    compile_all(problems, args.rows, args.sweep)
    print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    report = Report(args.rows, args.sweep)
    for problem in problems:
        report.bench(problem)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {time.monotonic() - started:.0f} s")
    if args.csv:
        append([line.measured for line in report.lines], args.csv)


if __name__ == "__main__":
    main()
