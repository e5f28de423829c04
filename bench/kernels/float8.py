"""`python -m bench.kernels.float8`: decode attention over keys of 16 and of 8 bits on one GPU, with the settings that are chosen.

CUDA-graph replays over permuted block tables, rotated over more than 400 MB of cache; bytes are those of keys and values.
"""

from __future__ import annotations

import itertools

import torch
import triton

from pagedcore_kernels import to_cache
from pagedcore_kernels.triton_ops.attention_common import card_of
from pagedcore_kernels.triton_ops.attention_decode import choose_config, paged_attention_decode
from pagedcore_kernels.triton_ops.attention_settings import DecodeConfig

ROTATED_BYTES = 400e6
BLOCK_SIZE, HEAD_DIM = 16, 128
HEADS = ((28, 4), (16, 8), (32, 32))
BATCHES = ((64, 2048), (256, 1024), (8, 2048), (8, 32768), (1, 32768))
TILES = ((128, 4, 3), (128, 8, 3), (64, 4, 3), (64, 4, 5), (128, 4, 5))
CACHE_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)


class Case:
    """Several copies of one problem, so that no replay finds its keys in the L2 cache."""

    def __init__(self, num_heads: int, num_kv_heads: int, num_sequences: int, seq_len: int, dtype: torch.dtype) -> None:
        num_blocks = num_sequences * seq_len // BLOCK_SIZE
        shape = (num_blocks, BLOCK_SIZE, 2 * num_kv_heads, HEAD_DIM)
        self.num_bytes = num_blocks * BLOCK_SIZE * 2 * num_kv_heads * HEAD_DIM * dtype.itemsize
        num_copies = max(1, -(-int(ROTATED_BYTES) // self.num_bytes))
        self.num_kv_heads, self.seq_len = num_kv_heads, seq_len
        drawn = to_cache(torch.randn(shape, device="cuda", dtype=torch.bfloat16), dtype)
        self.caches = [drawn.clone() for _ in range(num_copies)]
        self.tables = torch.randperm(num_blocks, device="cuda").int().view(num_sequences, -1)
        self.query = torch.randn(num_sequences, num_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self.lens = torch.full((num_sequences,), seq_len, dtype=torch.int32, device="cuda")
        self.out = torch.empty_like(self.query)

    def config(self) -> DecodeConfig:
        return choose_config(self.query, self.caches[0][:, :, : self.num_kv_heads], self.seq_len, None)

    def seconds(self, config: DecodeConfig) -> float:
        """Of one call."""

        def run() -> None:
            for cache in self.caches:
                keys, values = cache[:, :, : self.num_kv_heads], cache[:, :, self.num_kv_heads :]
                options = {"scale": HEAD_DIM**-0.5, "max_seq_len": self.seq_len, "config": config, "out": self.out}
                paged_attention_decode(self.query, keys, values, self.tables, self.lens, **options)

        return triton.testing.do_bench_cudagraph(run, rep=100) * 1e-3 / len(self.caches)


def main() -> None:
    card = card_of(torch.device("cuda", 0))
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, card)
    for (num_heads, num_kv_heads), (num_sequences, seq_len) in itertools.product(HEADS, BATCHES):
        if num_sequences * seq_len * num_kv_heads > 1 << 21:
            continue
        seconds = []
        for dtype in CACHE_DTYPES:
            case = Case(num_heads, num_kv_heads, num_sequences, seq_len, dtype)
            chosen = case.config()
            seconds.append(case.seconds(chosen))
            rates = {"chosen": case.num_bytes / seconds[-1] / 1e12}
            for block_n, num_warps, num_stages in TILES if dtype.itemsize == 1 else ():
                tile = DecodeConfig(block_n, num_warps, num_stages, chosen.num_splits, chosen.prefetch)
                rates[f"{block_n}x{num_warps}x{num_stages}"] = case.num_bytes / case.seconds(tile) / 1e12
            tb_per_s = " ".join(f"{name} {rate:.2f}" for name, rate in rates.items())
            print(f"{num_heads}/{num_kv_heads} heads, {num_sequences} x {seq_len}, {dtype}: {seconds[-1] * 1e6:.1f} us, TB/s: {tb_per_s}")
        print(f"    8 bits take {seconds[1] / seconds[0]:.2f} of the time of 16 bits", flush=True)


if __name__ == "__main__":
    main()
