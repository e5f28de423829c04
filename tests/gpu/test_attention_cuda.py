"""The attention kernels on a CUDA card, against the plain torch reference in float32."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pagedcore_kernels.triton_ops.attention_settings import DecodeConfig, PrefillConfig
from support.attention_problems import Problem, Sizes

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
RATIOS_AND_BLOCKS = [(1, 1, 8), (9, 3, 16), (5, 1, 24), (20, 1, 256), (28, 4, 16), (8, 8, 64), (16, 8, 16)]
DECODED = (1, 0, 16, 37, 1100, 2048, 333)
QUERIES, CONTEXTS = (1, 5, 129, 0, 1, 300, 64), (1100, 0, 260, 9, 37, 700, 0)


@pytest.fixture(autouse=True)
def exact_reference():
    torch.backends.cuda.matmul.allow_tf32 = False


def decode_problem(*seq_lens: int, seed: int = 0, **others: object) -> Problem:
    return Problem(Sizes(query_lens=(1,) * len(seq_lens), seq_lens=seq_lens, **others), "cuda", seed)


def prefill_problem(seed: int = 0, **others: object) -> Problem:
    seq_lens = tuple(query + context for query, context in zip(QUERIES, CONTEXTS, strict=True))
    return Problem(Sizes(query_lens=QUERIES, seq_lens=seq_lens, **others), "cuda", seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_all_head_sizes(dtype: torch.dtype, head_dim: int) -> None:
    problem = decode_problem(*DECODED, num_heads=28, num_kv_heads=4, head_dim=head_dim, dtype=dtype)
    problem.assert_close(problem.decode())
    problem = prefill_problem(num_heads=6, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    problem.assert_close(problem.prefill())


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "block_size"), RATIOS_AND_BLOCKS)
def test_all_head_ratios_and_block_sizes(num_heads: int, num_kv_heads: int, block_size: int) -> None:
    common = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "block_size": block_size, "dtype": torch.bfloat16}
    problem = decode_problem(*DECODED, **common, seed=1)
    problem.assert_close(problem.decode())
    problem = prefill_problem(**common, seed=1)
    problem.assert_close(problem.prefill())


@pytest.mark.parametrize("sliding_window", [1, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
def test_windows_at_every_head_size(head_dim: int, dtype: torch.dtype, sliding_window: int) -> None:
    """A tile begins with keys that some of its queries no longer see. Rounding of the scale decides whether they get a weight for it."""
    problem = prefill_problem(head_dim=head_dim, sliding_window=sliding_window, dtype=dtype, seed=2)
    problem.assert_close(problem.prefill())


@pytest.mark.parametrize("sliding_window", [None, 1, 33, 500])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_windows_and_caps(sliding_window: int | None, soft_cap: float | None) -> None:
    common = {"head_dim": 128, "sliding_window": sliding_window, "soft_cap": soft_cap, "dtype": torch.float16}
    problem = decode_problem(*DECODED, **common, seed=2)
    problem.assert_close(problem.decode())
    problem = prefill_problem(**common, seed=2)
    problem.assert_close(problem.prefill())


@pytest.mark.parametrize("num_splits", [1, 2, 7, 64, 128])
@pytest.mark.parametrize(("block_n", "num_stages"), [(16, 3), (32, 9), (64, 5), (128, 5)])
def test_every_split_of_a_context_gives_the_same(num_splits: int, block_n: int, num_stages: int) -> None:
    problem = decode_problem(*DECODED, num_heads=7, head_dim=128, dtype=torch.bfloat16, seed=3)
    problem.assert_close(problem.decode(DecodeConfig(block_n, 4, num_stages, num_splits)))


@pytest.mark.parametrize("config", [(128, 128, 8, 3), (128, 64, 8, 5), (64, 64, 4, 3), (16, 64, 4, 3)])
def test_every_tile_of_queries_gives_the_same(config: tuple[int, int, int, int]) -> None:
    problem = prefill_problem(num_heads=7, head_dim=128, dtype=torch.bfloat16, seed=4)
    problem.assert_close(problem.prefill(PrefillConfig(*config)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 8, 64), (28, 4, 128)])
@pytest.mark.parametrize(("num_queries", "num_cached"), [(300, 0), (1000, 1), (513, 2049), (1024, 15360), (4096, 1008)])
def test_a_gathered_run_by_cudnn(dtype, num_heads, num_kv_heads, head_dim, num_queries, num_cached) -> None:
    common = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": dtype}
    problem = Problem(Sizes(query_lens=(num_queries,), seq_lens=(num_queries + num_cached,), **common), "cuda", seed=12)
    problem.assert_close(problem.prefill_cudnn())


def test_addresses_beyond_32_bits() -> None:
    """A pool of more than 2^31 elements whose last blocks are in use: an offset of 32 bits would wrap."""
    sizes = Sizes(query_lens=(3, 1), seq_lens=(70, 45), num_heads=8, num_kv_heads=8, head_dim=128, dtype=torch.float16)
    num_blocks = 2**31 // (16 * 16 * 128) + 64
    problem = Problem(sizes, "cuda", seed=5, num_extra_blocks=num_blocks)
    for row, blocks in enumerate(problem.block_tables):
        used = -(-sizes.seq_lens[row] // 16)
        moved = torch.arange(problem.cache.shape[0] - 8 * (row + 1), problem.cache.shape[0] - 8 * (row + 1) + used, device="cuda")
        for cache in (problem.cache, problem.clean):
            cache[moved] = cache[blocks[:used].long()].clone()
        blocks[:used] = moved.int()
    problem.assert_close(problem.prefill())
    decoder = Problem(Sizes(query_lens=(1, 1), seq_lens=(70, 45), num_heads=8, num_kv_heads=8, head_dim=128, dtype=torch.float16), "cuda")
    decoder.cache, decoder.clean, decoder.block_tables = problem.cache, problem.clean, problem.block_tables
    decoder.assert_close(decoder.decode())


@pytest.mark.parametrize("num_splits", [1, 8])
def test_a_graph_follows_what_changes_on_the_device(num_splits: int) -> None:
    problem = decode_problem(*DECODED, num_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, seed=6)
    config, out = DecodeConfig(64, 4, 5, num_splits), torch.empty_like(problem.query)
    workspace = torch.full((problem.query.numel() * 9,), float("nan"), device="cuda")
    options = {"config": config, "out": out, "workspace": workspace, "max_seq_len": 4096}
    problem.decode(**options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.decode(**options)
    for seed in (7, 8):
        other = decode_problem(*reversed(DECODED), num_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, seed=seed)
        for name in ("query", "cache", "block_tables", "seq_lens"):
            getattr(problem, name).copy_(getattr(other, name))
        out.fill_(float("nan"))
        graph.replay()
        other.assert_close(out)
        assert torch.equal(out, other.decode(config, max_seq_len=4096)), "a graph and a plain call run the same kernel"


def test_a_graph_of_a_mixed_batch_follows_its_lengths() -> None:
    problem = prefill_problem(num_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, seed=9)
    out = torch.empty_like(problem.query)
    problem.prefill(out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.prefill(out=out)
    other = prefill_problem(num_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, seed=10)
    for name in ("query", "cache", "block_tables", "seq_lens", "query_start_loc"):
        getattr(problem, name).copy_(getattr(other, name))
    out.fill_(float("nan"))
    graph.replay()
    other.assert_close(out)
    assert torch.equal(out, other.prefill())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 32, 128), (28, 4, 128), (5, 1, 80)])
@pytest.mark.parametrize("num_sequences", [1, 7, 100])
def test_each_element_is_stored_at_its_place(dtype, num_heads: int, num_kv_heads: int, head_dim: int, num_sequences: int) -> None:
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": dtype}
    lens = [100 + 37 * index for index in range(num_sequences)]
    problem = decode_problem(*lens, **heads, seed=17)
    problem.assert_placed(problem.decode)
    problem.assert_placed(partial(problem.decode_shared, problem.share(3)))


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="8-bit floats need sm_89")
def test_caches_of_eight_bits() -> None:
    common = {"num_heads": 7, "head_dim": 128, "dtype": torch.bfloat16}
    for problem, attend in ((decode_problem(*DECODED, **common), Problem.decode), (prefill_problem(**common), Problem.prefill)):
        stored = (problem.clean.float() * 2).to(torch.float8_e4m3fn)
        problem.clean = (stored.float() / 2).bfloat16()
        is_used = ~problem.cache.isnan()
        problem.cache = torch.where(is_used, stored.view(torch.uint8), 0x7F).view(torch.float8_e4m3fn)
        problem.assert_close(attend(problem, key_scale=0.5, value_scale=0.5))


@pytest.mark.parametrize("num_sequences", [3, 100])
@pytest.mark.parametrize("num_blocks", [0, 1, 40, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(28, 4), (4, 4)])
def test_a_shared_prefix(num_sequences: int, num_blocks: int, num_heads: int, num_kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(14)
    lens = (torch.randint(1, 200, (num_sequences,), generator=generator) + 128 * 16).tolist()
    problem = decode_problem(*lens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128, dtype=torch.bfloat16, seed=15)
    for alone in ((), (1,), (0, 2)):
        problem.assert_close(problem.decode_shared(problem.share(num_blocks, alone)))


def test_a_graph_serves_every_prefix() -> None:
    problem = decode_problem(*range(700, 780), 0, 0, num_heads=28, num_kv_heads=4, head_dim=128, dtype=torch.bfloat16, seed=16)
    table, lens = torch.zeros_like(problem.block_tables[0]), torch.zeros_like(problem.seq_lens)
    out = torch.empty_like(problem.query)
    problem.decode_shared((table, lens), out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.decode_shared((table, lens), out=out)
    for num_blocks, alone in ((43, ()), (0, ()), (1, (0, 79)), (30, tuple(range(0, 80, 2)))):
        prefix = problem.share(num_blocks, alone)
        table.copy_(prefix[0])
        lens.copy_(prefix[1])
        out.fill_(float("nan"))
        graph.replay()
        problem.assert_close(out)
        assert torch.equal(out, problem.decode_shared(prefix)), "a graph and a plain call run the same kernels"


def test_random_mixed_batches() -> None:
    generator = torch.Generator().manual_seed(13)
    for seed in range(10):
        num_decodes = int(torch.randint(0, 60, (), generator=generator))
        contexts = torch.randint(0, 900, (num_decodes + 3,), generator=generator).tolist()
        query_lens = (*(1,) * num_decodes, *torch.randint(2, 400, (3,), generator=generator).tolist())
        seq_lens = tuple(query + context for query, context in zip(query_lens, contexts, strict=True))
        problem = Problem(
            Sizes(query_lens=query_lens, seq_lens=seq_lens, num_heads=14, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16), "cuda", seed
        )
        problem.assert_close(problem.mixed(num_decodes))


def test_random_batches() -> None:
    generator = torch.Generator().manual_seed(11)
    for seed in range(20):
        lens = torch.randint(0, 900, (int(torch.randint(1, 40, (), generator=generator)),), generator=generator).tolist()
        problem = decode_problem(*lens, num_heads=14, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, seed=seed)
        problem.assert_close(problem.decode())
