"""Decode attention over contexts of different lengths: what each launch setting gives.

python -m bench.kernels.ragged [--rows 32 128 256] [--lengths 100 1700]
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics

import torch
from torch import Tensor

from pagedcore_kernels.triton_ops.attention_common import card_of
from pagedcore_kernels.triton_ops.attention_decode import paged_attention_decode
from pagedcore_kernels.triton_ops.attention_settings import DecodeConfig

BLOCK_SIZE = 16
MAX_SEQ_LEN = 2048
READ_BYTES_PER_S = 4.37e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128, 256])
    parser.add_argument("--lengths", type=int, nargs=2, default=[100, 1700], metavar=("SHORTEST", "LONGEST"))
    arguments = parser.parse_args()
    if arguments.lengths[1] > MAX_SEQ_LEN:
        parser.error(f"--lengths go up to {MAX_SEQ_LEN}, for which the settings are chosen")
    card = card_of(torch.device("cuda"))
    print(torch.cuda.get_device_name(), card)
    for (heads, kv_heads), rows in itertools.product(((16, 8), (32, 32), (28, 4)), arguments.rows):
        _measure(heads, kv_heads, rows, *arguments.lengths)


def _measure(heads: int, kv_heads: int, rows: int, shortest: int, longest: int) -> None:
    draw = random.Random(rows)
    lengths = [draw.randint(shortest, longest) for _ in range(rows)]
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    total = sum(blocks)
    generator = torch.Generator("cuda").manual_seed(0)
    caches = [torch.randn(total, BLOCK_SIZE, 2 * kv_heads, 128, generator=generator, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    order = torch.randperm(total, generator=generator, device="cuda").int()
    tables = torch.zeros(rows, max(blocks), dtype=torch.int32, device="cuda")
    first = 0
    for row, count in enumerate(blocks):
        tables[row, :count] = order[first : first + count]
        first += count
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    query = torch.randn(rows, heads, 128, generator=generator, dtype=torch.bfloat16, device="cuda")
    floor_us = 1e6 * sum(lengths) * kv_heads * 512 / READ_BYTES_PER_S
    results = []
    for block_n, warps, stages, splits in itertools.product((64, 128), (2, 4, 8), (3, 5), (1, 2, 4)):
        config = DecodeConfig(block_n, warps, stages, splits)
        try:
            results.append((_time_us(query, caches, kv_heads, tables, lens, config), block_n, warps, stages, splits))
        except Exception as error:
            print(config, type(error).__name__)
    chosen = _time_us(query, caches, kv_heads, tables, lens, None)
    best = [tuple(round(value, 1) for value in result) for result in sorted(results)[:4]]
    print(f"{heads}/{kv_heads} rows={rows} of {shortest} to {longest} floor={floor_us:.0f} chosen={chosen:.1f} best={best}")


def _time_us(query: Tensor, caches: list[Tensor], kv_heads: int, tables: Tensor, lens: Tensor, config: DecodeConfig | None) -> float:
    def step() -> None:
        for cache in caches:
            keys, values = cache[:, :, :kv_heads], cache[:, :, kv_heads:]
            paged_attention_decode(query, keys, values, tables, lens, scale=0.088, max_seq_len=MAX_SEQ_LEN, config=config)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end) / len(caches))
    return statistics.median(times)


if __name__ == "__main__":
    main()
