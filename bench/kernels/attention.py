"""`python -m bench.kernels.attention [--json FILE] [--sweep] [--budget SECONDS]`: the attention kernels on one GPU.

Decode: CUDA-graph replays over permuted block tables, rotated over more than 400 MB of cache; share = bytes that must be read /
time / 4.37 TB/s (what a plain read reaches on an H200). Prefill: TFLOP/s beside torch's own kernels on contiguous tensors.
Each configuration is compared with the plain torch reference before it is timed. --sweep tries a grid of configurations.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pagedcore_kernels import paged_attention
from pagedcore_kernels.triton_ops.attention_common import card_of
from pagedcore_kernels.triton_ops.attention_decode import paged_attention_decode
from pagedcore_kernels.triton_ops.attention_prefill import paged_attention_prefill
from pagedcore_kernels.triton_ops.attention_prefill_cudnn import paged_attention_prefill_cudnn
from pagedcore_kernels.triton_ops.attention_settings import (
    DecodeConfig,
    DecodeShape,
    PrefillConfig,
    PrefillShape,
    PrefixConfig,
    choose_decode_config,
    choose_prefill_config,
    choose_prefix_config,
    share_of_split,
)
from pagedcore_kernels.triton_ops.attention_shared_prefix import paged_attention_decode_shared

READ_BYTES_PER_S = 4.37e12
ROTATED_BYTES = 400e6
BLOCK_SIZE = 16
HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5
MAX_RELATIVE_ERROR = 1e-2
DECODE_SHARE_OF_BUDGET = 0.65
OWN_KEYS, LONGEST_KEYS = 64, 32768
SHARED = ((256, 2048), (128, 2048), (64, 2048), (32, 2048), (256, 512), (256, 128), (64, 512))
PREFIX_PARTS = (1, 2, 3, 4, 8)
HEADS = ((28, 4), (32, 32), (16, 8))
BATCHES = ((64, 2048), (1, 32768), (8, 2048), (256, 1024), (8, 32768), (1, 1024), (256, 256))
# (block_n, num_warps, num_stages): with 3, 5, 7 stages 1, 2, 3 tiles are in flight.
DECODE_TILES = (
    (32, 2, 3),
    (32, 2, 7),
    (32, 4, 9),
    (64, 4, 3),
    (64, 4, 5),
    (64, 4, 7),
    (64, 4, 11),
    (64, 8, 7),
    (64, 8, 9),
    (128, 4, 3),
    (128, 8, 3),
    (128, 8, 5),
    (128, 8, 7),
)
PREFILL_TILES = (
    (128, 128, 8, 3),
    (128, 128, 8, 5),
    (128, 64, 8, 3),
    (128, 64, 8, 5),
    (64, 64, 4, 3),
    (64, 64, 4, 5),
    (64, 128, 4, 3),
    (64, 32, 4, 5),
    (256, 64, 8, 3),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One timed configuration."""

    kernel: str
    heads: str
    work: str
    config: tuple[int, ...]
    us: float
    share: float
    """Of the read bandwidth for decode, TFLOP/s for prefill."""
    relative_error: float
    chosen: bool
    note: str = ""


@dataclass
class Report:
    """Results so far; says them as they come."""

    budget_s: float
    started: float = field(default_factory=time.monotonic)
    results: list[Result] = field(default_factory=list)

    def is_late(self, share_of_budget: float) -> bool:
        return time.monotonic() - self.started > share_of_budget * self.budget_s

    def add(self, result: Result) -> None:
        self.results.append(result)

    def say(self) -> None:
        """The chosen configuration of each shape and, after a sweep, the three fastest."""
        for key in dict.fromkeys((r.kernel, r.heads, r.work) for r in self.results):
            same = sorted((r for r in self.results if (r.kernel, r.heads, r.work) == key), key=lambda r: r.us)
            chosen = [r for r in same if r.chosen]
            best = [] if len(same) == len(chosen) else same[:3]
            for mark, result in [("chosen", r) for r in chosen] + [("best", r) for r in best]:
                unit = f"{result.share:6.1%}" if result.kernel == "decode" else f"{result.share:6.0f} TFLOP/s"
                where = f"{result.kernel:8} {result.heads:6} {result.work:12}"
                print(f"{where} {mark:6} {result.us:9.1f} us {unit} {result.config} error {result.relative_error:.1e} {result.note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one line for each result to this file")
    parser.add_argument("--sweep", action="store_true", help="try a grid of configurations for each shape")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds after which no further shape is begun")
    parser.add_argument("--only", choices=("shared", "decode", "prefill"), help="one of the three")
    args = parser.parse_args()
    torch.manual_seed(0)
    report = Report(args.budget)
    if args.only in (None, "shared"):
        bench_shared_prefix(report, args.sweep)
    if args.only in (None, "decode"):
        bench_decode(report, args.sweep)
    torch.cuda.empty_cache()
    if args.only in (None, "prefill"):
        bench_prefill(report, args.sweep)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {time.monotonic() - report.started:.0f} s"
    )
    report.say()
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps({"device": torch.cuda.get_device_name(), **asdict(result)}) + "\n" for result in report.results)


# --- decode -----------------------------------------------------------------------------------------------------------


class DecodeProblem:
    """One shape: a pool of caches, and several permuted tables over it so that no replay finds its keys in the L2 cache."""

    def __init__(self, num_heads: int, num_kv_heads: int, batch: int, context: int) -> None:
        self.num_heads, self.num_kv_heads, self.batch, self.context = num_heads, num_kv_heads, batch, context
        blocks_each = math.ceil(context / BLOCK_SIZE)
        block_bytes = BLOCK_SIZE * 2 * num_kv_heads * HEAD_DIM * 2
        self.read_bytes = batch * context * 2 * num_kv_heads * HEAD_DIM * 2 + 2 * batch * num_heads * HEAD_DIM * 2
        num_tables = max(1, math.ceil(ROTATED_BYTES / (batch * blocks_each * block_bytes)))
        num_blocks = num_tables * batch * blocks_each
        self.cache = torch.empty(num_blocks, BLOCK_SIZE, 2 * num_kv_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda").normal_()
        self.tables = torch.randperm(num_blocks, device="cuda").int().view(num_tables, batch, blocks_each)
        self.seq_lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self.query = torch.randn(batch, num_heads, HEAD_DIM, device="cuda").bfloat16()
        self.out = torch.empty_like(self.query)
        self.workspace = torch.empty(batch * num_heads * 128 * (HEAD_DIM + 1), dtype=torch.float32, device="cuda")
        self.rows = sorted({0, batch // 2, batch - 1})
        self.expected = self._reference()

    @property
    def floor_us(self) -> float:
        return self.read_bytes / READ_BYTES_PER_S * 1e6

    def _reference(self) -> Tensor:
        rows = torch.tensor(self.rows, device="cuda")
        starts = torch.arange(len(self.rows) + 1)
        keys, values = self.cache[:, :, : self.num_kv_heads], self.cache[:, :, self.num_kv_heads :]
        return paged_attention(self.query[rows].float(), keys, values, self.tables[0][rows], self.seq_lens[rows], starts, scale=SCALE)

    def attend(self, table: Tensor, config: DecodeConfig | None) -> Tensor:
        return paged_attention_decode(
            self.query,
            self.cache[:, :, : self.num_kv_heads],
            self.cache[:, :, self.num_kv_heads :],
            table,
            self.seq_lens,
            scale=SCALE,
            max_seq_len=self.context,
            config=config,
            workspace=self.workspace,
            out=self.out,
        )

    def chosen(self) -> DecodeConfig:
        shape = DecodeShape(self.batch, self.num_heads, self.num_kv_heads, HEAD_DIM, 2, self.context)
        return choose_decode_config(shape, card_of(self.query.device))

    def measure(self, config: DecodeConfig) -> Result:
        self.out.fill_(float("nan"))
        error = relative_error(self.attend(self.tables[0], config)[self.rows], self.expected)
        calls = [lambda table=table: self.attend(table, config) for table in self.tables]
        us = time_replays(calls, self.floor_us)
        settings = (config.block_n, config.num_warps, config.num_stages, config.num_splits, int(config.prefetch))
        heads, work = f"{self.num_heads}/{self.num_kv_heads}", f"{self.batch} x {self.context}"
        return Result("decode", heads, work, settings, us, self.floor_us / us, error, config == self.chosen())


def bench_decode(report: Report, sweep: bool) -> None:
    for num_heads, num_kv_heads in HEADS:
        if sweep:
            small = DecodeProblem(num_heads, num_kv_heads, 1, 64)
            compile_all(partial(small.attend, small.tables[0]), decode_variants())
        for batch, context in BATCHES:
            if report.is_late(DECODE_SHARE_OF_BUDGET):
                print(f"out of time before decode {num_heads}/{num_kv_heads} {batch} x {context}")
                return
            problem = DecodeProblem(num_heads, num_kv_heads, batch, context)
            measured = len(report.results)
            for config in dict.fromkeys([problem.chosen(), *(decode_candidates(problem) if sweep else ())]):
                attempt(report, "decode", config, partial(problem.measure, config))
            if sweep and len(report.results) > measured:
                *settings, prefetch = min(report.results[measured:], key=lambda result: result.us).config
                other = DecodeConfig(*settings, prefetch=not prefetch)
                attempt(report, "decode", other, partial(problem.measure, other))
            del problem


def decode_candidates(problem: DecodeProblem) -> Iterator[DecodeConfig]:
    """Each tile with the splits that give about 1, 2, 3, 4 and 6 programs a multiprocessor, as far as there are tiles for them."""
    rows, num_multiprocessors = problem.batch * problem.num_kv_heads, card_of(problem.query.device).num_multiprocessors
    for tile in DECODE_TILES:
        most = min(128, math.ceil(problem.context / tile[0]))
        wanted = {max(1, min(most, num_multiprocessors * waves // rows)) for waves in (1, 2, 3, 4, 6)}
        for num_splits in sorted({math.ceil(problem.context / share_of_split(problem.context, n)) for n in wanted}):
            yield DecodeConfig(*tile, num_splits, prefetch=rows * num_splits <= 3 * num_multiprocessors)


def decode_variants() -> list[DecodeConfig]:
    """One configuration for each kernel that the tiles compile to."""
    return [DecodeConfig(*tile, splits, prefetch) for tile in DECODE_TILES for splits in (1, 2) for prefetch in (False, True)]


class SharedProblem:
    """Sequences that begin with the same keys and have 64 of their own, in several tables over one pool, so that own keys are read anew."""

    def __init__(self, batch: int, num_shared: int) -> None:
        self.batch, self.num_shared = batch, num_shared
        self.plain = DecodeProblem(28, 4, batch, num_shared + OWN_KEYS)
        shared, own = num_shared // BLOCK_SIZE, OWN_KEYS // BLOCK_SIZE
        order = torch.randperm(self.plain.cache.shape[0], device="cuda").int()
        num_tables = max(1, min(16, len(order) // (shared + batch * own)))
        blocks = order[: num_tables * (shared + batch * own)].view(num_tables, -1)
        prefixes, rests = blocks[:, None, :shared].expand(-1, batch, -1), blocks[:, shared:].view(num_tables, batch, own)
        self.tables = torch.cat((prefixes, rests), 2).contiguous()
        self.prefix_lens = torch.full((batch,), num_shared, dtype=torch.int32, device="cuda")
        self.expected = self.attend_plain(self.tables[0]).clone()

    def attend_plain(self, table: Tensor) -> Tensor:
        return self.plain.attend(table, None)

    def attend(self, table: Tensor, config: PrefixConfig | None) -> Tensor:
        return paged_attention_decode_shared(
            self.plain.query,
            self.plain.cache[:, :, :4],
            self.plain.cache[:, :, 4:],
            table[0],
            self.prefix_lens,
            table,
            self.plain.seq_lens,
            scale=SCALE,
            max_prefix_len=LONGEST_KEYS,
            max_seq_len=LONGEST_KEYS,
            config=config,
            out=self.plain.out,
        )

    def chosen(self) -> PrefixConfig:
        """As for a graph, which must serve contexts of any length."""
        return choose_prefix_config(PrefillShape(7, HEAD_DIM, 2, self.batch), 4, LONGEST_KEYS, card_of(self.plain.query.device))

    def measure(self, config: PrefixConfig) -> Result:
        tile = config.tile
        settings = (tile.block_m, tile.block_n, tile.num_warps, tile.num_stages, config.num_parts)
        return self._time(partial(self.attend, config=config), settings, config == self.chosen(), "read once")

    def measure_plain(self) -> Result:
        return self._time(self.attend_plain, (), True, "read by each")

    def _time(self, call: Callable[[Tensor], Tensor], settings: tuple[int, ...], is_chosen: bool, note: str) -> Result:
        self.plain.out.fill_(float("nan"))
        error = relative_error(call(self.tables[0]), self.expected)
        floor_us = (self.num_shared + self.batch * OWN_KEYS) * 2 * 4 * HEAD_DIM * 2 / READ_BYTES_PER_S * 1e6
        us = time_replays([partial(call, table) for table in self.tables], floor_us)
        work = f"{self.batch} x ({self.num_shared} shared + {OWN_KEYS})"
        return Result("decode", "28/4", work, settings, us, floor_us / us, error, is_chosen, note)


def bench_shared_prefix(report: Report, sweep: bool) -> None:
    for batch, num_shared in SHARED:
        problem = SharedProblem(batch, num_shared)
        candidates = [PrefixConfig(PrefillConfig(*tile), parts) for tile in PREFILL_TILES for parts in PREFIX_PARTS] if sweep else []
        for config in dict.fromkeys([problem.chosen(), *candidates]):
            attempt(report, "decode", config, partial(problem.measure, config))
        attempt(report, "decode", "read by each", problem.measure_plain)


# --- prefill ----------------------------------------------------------------------------------------------------------


class PrefillProblem:
    """One sequence: `num_queries` tokens over `num_cached` tokens that are already paged."""

    def __init__(self, num_heads: int, num_kv_heads: int, num_queries: int, num_cached: int) -> None:
        self.num_heads, self.num_kv_heads, self.num_queries, self.num_cached = num_heads, num_kv_heads, num_queries, num_cached
        seq_len = num_queries + num_cached
        num_blocks = math.ceil(seq_len / BLOCK_SIZE)
        self.flops = 4 * num_heads * HEAD_DIM * (num_queries * num_cached + num_queries**2 / 2)
        self.cache = torch.empty(num_blocks, BLOCK_SIZE, 2 * num_kv_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda").normal_()
        self.table = torch.randperm(num_blocks, device="cuda").int().view(1, -1)
        self.seq_lens = torch.tensor([seq_len], dtype=torch.int32, device="cuda")
        self.starts = torch.tensor([0, num_queries], dtype=torch.int32, device="cuda")
        self.query = torch.randn(num_queries, num_heads, HEAD_DIM, device="cuda").bfloat16()
        self.out = torch.empty_like(self.query)

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        return self.cache[:, :, : self.num_kv_heads], self.cache[:, :, self.num_kv_heads :]

    def attend(self, config: PrefillConfig | None) -> Tensor:
        keys, values = self.caches
        return paged_attention_prefill(
            self.query,
            keys,
            values,
            self.table,
            self.seq_lens,
            self.starts,
            scale=SCALE,
            max_query_len=self.num_queries,
            config=config,
            out=self.out,
        )

    def error(self, actual: Tensor) -> float:
        """Against the reference on three runs of 64 queries: first, middle, last."""
        errors = []
        for first in (0, self.num_queries // 2 + 5, self.num_queries - 64):
            seq_lens = torch.tensor([self.num_cached + first + 64], device="cuda")
            rows = self.query[first : first + 64].float()
            expected = paged_attention(rows, *self.caches, self.table, seq_lens, torch.tensor([0, 64]), scale=SCALE)
            errors.append(relative_error(actual[first : first + 64], expected))
        return max(errors, key=lambda error: math.inf if math.isnan(error) else error)

    def chosen(self) -> PrefillConfig:
        shape = PrefillShape(self.num_heads // self.num_kv_heads, HEAD_DIM, 2, self.num_queries)
        return choose_prefill_config(shape, card_of(self.query.device))

    def measure(self, config: PrefillConfig) -> Result:
        self.out.fill_(float("nan"))
        error = self.error(self.attend(config))
        us = time_calls(lambda: self.attend(config))
        settings = (config.block_m, config.block_n, config.num_warps, config.num_stages)
        return self.result(settings, us, error, config == self.chosen())

    def result(self, settings: tuple[int, ...], us: float, error: float, chosen: bool, note: str = "") -> Result:
        heads, work = f"{self.num_heads}/{self.num_kv_heads}", f"{self.num_queries} + {self.num_cached}"
        return Result("prefill", heads, work, settings, us, self.flops / us / 1e6, error, chosen, note)

    def attend_gathered(self) -> Tensor:
        seq_len = self.num_queries + self.num_cached
        return paged_attention_prefill_cudnn(self.query, *self.caches, self.table[0], seq_len=seq_len, scale=SCALE, out=self.out)

    def measure_gathered(self) -> Result:
        self.out.fill_(float("nan"))
        error = self.error(self.attend_gathered())
        return self.result((), time_calls(self.attend_gathered), error, True, "gathered, cuDNN")

    def measure_torch(self, backend: SDPBackend) -> Result:
        """The causal square, and the cached part as a second call without a mask: the same work, contiguous."""
        keys = torch.randn(1, self.num_kv_heads, max(self.num_queries, self.num_cached), HEAD_DIM, device="cuda").bfloat16()
        values = torch.randn_like(keys)
        query = self.query.transpose(0, 1)[None].contiguous()
        options = {"scale": SCALE, "enable_gqa": self.num_heads != self.num_kv_heads}
        own, cached = slice(0, self.num_queries), slice(0, self.num_cached)

        def attend(part: slice, is_causal: bool) -> Tensor:
            return scaled_dot_product_attention(query, keys[:, :, part], values[:, :, part], is_causal=is_causal, **options)

        with sdpa_kernel([backend]):
            us = time_calls(lambda: attend(own, True))
            us += time_calls(lambda: attend(cached, False)) if self.num_cached else 0.0
        return self.result((), us, 0.0, True, f"torch {backend.name}, not compared")


def bench_prefill(report: Report, sweep: bool) -> None:
    for num_heads, num_kv_heads in HEADS[:2]:
        if sweep:
            compile_all(PrefillProblem(num_heads, num_kv_heads, 128, 0).attend, [PrefillConfig(*tile) for tile in PREFILL_TILES])
        for num_queries, num_cached in ((8192, 0), (8192, 8192)):
            if report.is_late(1.0):
                print(f"out of time before prefill {num_heads}/{num_kv_heads} {num_queries} + {num_cached}")
                return
            problem = PrefillProblem(num_heads, num_kv_heads, num_queries, num_cached)
            candidates = [PrefillConfig(*tile) for tile in PREFILL_TILES] if sweep else []
            for config in dict.fromkeys([problem.chosen(), *candidates]):
                attempt(report, "prefill", config, partial(problem.measure, config))
            attempt(report, "prefill", "gathered", problem.measure_gathered)
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                attempt(report, "prefill", backend, partial(problem.measure_torch, backend))


# --- both -------------------------------------------------------------------------------------------------------------


def attempt(report: Report, kernel: str, config: object, measure: Callable[[], Result]) -> None:
    """A configuration that the card refuses (shared memory, registers) or that errs is named and left out."""
    try:
        result = measure()
    except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
        print(f"{kernel} {config}: {str(error).splitlines()[0][:160]}")
        return
    if not result.relative_error < MAX_RELATIVE_ERROR:
        print(f"WRONG: {kernel} {result.heads} {result.work} {config}: relative error {result.relative_error}")
        return
    report.add(result)


def compile_all(attend: Callable[[Any], Tensor], configs: list[Any]) -> None:
    """In threads: Triton's passes and the assembler run outside of Python's lock. What fails here is named when it is measured."""
    with ThreadPoolExecutor(16) as pool:
        for config in configs:
            pool.submit(attend, config)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def time_replays(calls: list[Callable[[], object]], floor_us: float, num_replays: int = 5) -> float:
    """Median microseconds of a call, in replays of a graph of at least 1.5 ms that makes each call equally often."""
    calls[0]()
    torch.cuda.synchronize()
    rounds = max(1, min(400 // len(calls), math.ceil(1500 / (floor_us * len(calls)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    return statistics.median(event_us(graph.replay) for _ in range(num_replays)) / (rounds * len(calls))


def time_calls(call: Callable[[], object], num_calls: int = 7) -> float:
    """Median microseconds of a call that takes milliseconds."""
    call()
    return statistics.median(event_us(call) for _ in range(num_calls))


def event_us(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


if __name__ == "__main__":
    main()
