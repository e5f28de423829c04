"""Results of `pagedcore bench` as a run would leave them, for files, tables and plots."""

from __future__ import annotations

from collections.abc import Sequence

from pagedcore.commands.bench.results import Command, Point, Results
from pagedcore.commands.bench.spread import Spread

FACTS = {
    "device": "NVIDIA H200",
    "model": "Qwen3-0.6B",
    "dtype": "bfloat16",
    "quantization": None,
    "pagedcore": "0.1.0",
    "commit": "abc1234",
}


ROOFS = {"read_tb_per_s": 4.37, "copy_tb_per_s": 4.3, "matmul_tflop_per_s": 780.0}


def spread(*rounds: float) -> Spread:
    return Spread.median_of(rounds)


def throughput_point(concurrency: int, *tokens_per_s: float) -> Point:
    names = ("tokens_per_s", "wall_s", "first_token_p50_ms", "first_token_p99_ms", "per_token_p50_ms", "per_token_p99_ms")
    return {
        "concurrency": concurrency,
        "num_requests": 4 * concurrency,
        "cached_fraction": 0.0,
        "output_tokens_per_s": spread(*tokens_per_s),
        **{name: spread(1.5, 2.5) for name in names},
    }


def latency_point(batch: int, context: int, *ms: float) -> Point:
    return {"batch": batch, "context": context, "per_token_ms": spread(*ms), "first_token_ms": spread(10.0, 12.0)}


def prefix_point(caches: bool, *seconds: float) -> Point:
    names = ("output_tokens_per_s", "first_token_p50_ms", "first_token_p99_ms")
    rate = spread(0.9) if caches else spread(0.0)
    return {"prefix_caching": caches, "wall_s": spread(*seconds), "hit_rate": rate, **{name: spread(3.0) for name in names}}


def serve_point(load: str, concurrency: int, rate: float | None, *tokens_per_s: float) -> Point:
    kinds = ("first_token_p50_ms", "first_token_p99_ms", "inter_token_p50_ms", "inter_token_p99_ms")
    names = (*kinds, "settled_inter_token_p50_ms", "settled_inter_token_p99_ms", "end_to_end_p50_s", "end_to_end_p99_s")
    numbers = {name: spread(12_345.6) for name in names}
    return {"load": load, "concurrency": concurrency, "rate": rate, "output_tokens_per_s": spread(*tokens_per_s), **numbers}


def kernel_point(kernel: str, us: float, share: float) -> Point:
    return {"kernel": kernel, "work": "64 x 3584 x 152064", "us": spread(us), "roof": "read", "rate": 4.1, "unit": "TB/s", "share": share}


def product_point(matrix: str, rows: int, us: float, plain_us: float) -> Point:
    sizes = {"matrix": matrix, "in_features": 4096, "out_features": 12288}
    return {**sizes, "rows": rows, "us": spread(us), "plain_us": spread(plain_us), "speed_up": plain_us / us, "share": 0.6}


def results(command: Command, points: Sequence[Point], label: str = "pagedcore 0.1.0") -> Results:
    return Results(
        command=command, label=label, facts=FACTS, work={"rounds": 2, "output_tokens": "100 to 1,024", "bits": 4, **ROOFS}, points=points
    )


ALL = [
    results("throughput", [throughput_point(1, 22_000.0, 23_070.0), throughput_point(256, 24_109.5, 25_010.0)]),
    results("latency", [latency_point(b, c, 1.0, 1.2, 1.1) for b in (1, 32) for c in (128, 8192)]),
    results("prefix", [prefix_point(True, 1.3, 1.4), prefix_point(False, 12.0, 12.7)]),
    results("serve", [serve_point("1 in flight", 1, None, 472.0), serve_point("256 in flight", 256, None, 16_836.0, 21_677.0)]),
    results("kernels", [kernel_point("decode attention", 130.1, 0.94), kernel_point("linear logits", 1127.6, 0.84)]),
    results("products", [product_point("qkv", 1, 10.0, 25.0), product_point("qkv", 64, 20.0, 30.0)]),
]
