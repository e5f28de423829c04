"""Both attention kernels under the interpreter, against the plain torch reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcore_kernels.triton_ops import attention_prefill_cudnn
from pagedcore_kernels.triton_ops.attention_common import UNSEEN, ScoreScale, softmax_step
from pagedcore_kernels.triton_ops.attention_settings import DecodeConfig, PrefillConfig, PrefixConfig
from support.attention_problems import Problem, Sizes

HALF = torch.float16
FLOAT8 = torch.float8_e4m3fn
HEADS = [(1, 1, 64), (7, 1, 80), (6, 3, 96), (20, 1, 64), (4, 2, 128), (2, 1, 256)]
SMALL_TILES = DecodeConfig(block_n=16, num_warps=4, num_stages=2, num_splits=3)
ONE_SPLIT = DecodeConfig(block_n=32, num_warps=4, num_stages=2, num_splits=1)
SMALL_QUERY_TILES = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)


def decode_sizes(*seq_lens: int, **others: object) -> Sizes:
    return Sizes(query_lens=(1,) * len(seq_lens), seq_lens=seq_lens, **others)


@pytest.mark.parametrize("config", [SMALL_TILES, ONE_SPLIT, None])
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_decode_equals_reference_over_permuted_blocks(config, block_size: int) -> None:
    problem = Problem(decode_sizes(1, 0, 37, 130, block_size=block_size))
    problem.assert_close(problem.decode(config))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 64), (7, 1, 80), (6, 3, 96), (20, 1, 64), (4, 2, 128), (2, 1, 256)]
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_decode_of_all_head_sizes_and_ratios(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    problem = Problem(decode_sizes(5, 70, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype))
    problem.assert_close(problem.decode(SMALL_TILES))


@pytest.mark.parametrize("sliding_window", [1, 7, 33, 1000])
@pytest.mark.parametrize("config", [SMALL_TILES, ONE_SPLIT])
def test_decode_sees_its_window_only(sliding_window: int, config: DecodeConfig) -> None:
    problem = Problem(decode_sizes(3, 64, 101, sliding_window=sliding_window, soft_cap=2.0))
    problem.assert_close(problem.decode(config))


def test_decode_gives_zeros_for_padding_rows_and_keeps_no_part_of_the_workspace() -> None:
    problem = Problem(decode_sizes(0, 90, 0))
    workspace = torch.full((3 * 3 * 3 * 65,), float("nan"))
    actual = problem.decode(SMALL_TILES, workspace=workspace)
    assert torch.equal(actual[[0, 2]], torch.zeros(2, 3, 64))
    problem.assert_close(actual)


def test_decode_depends_on_lengths_on_the_device_not_on_the_longest_that_was_planned_for() -> None:
    problem = Problem(decode_sizes(20, 40))
    problem.assert_close(problem.decode(max_seq_len=4096))


def test_a_context_below_a_tile_is_shared_out_too() -> None:
    problem = Problem(decode_sizes(150, 31, 33))
    workspace = torch.full((3 * 3 * 5 * 65,), float("nan"))
    problem.assert_close(problem.decode(DecodeConfig(block_n=64, num_warps=4, num_stages=3, num_splits=5), workspace=workspace))
    written = ~workspace[-3 * 3 * 5 :].view(3, 3, 5)[:, 0].isnan()
    assert written.sum(dim=1).tolist() == [5, 1, 2], "parts of 32 keys each"


def test_decode_writes_into_and_returns_out() -> None:
    problem = Problem(decode_sizes(20, 40))
    wide = torch.full((2, 5, 64), float("nan"))
    out = wide[:, 1:4]
    assert problem.decode(SMALL_TILES, out=out) is out
    problem.assert_close(out)
    assert bool(wide[:, [0, 4]].isnan().all())


def test_stored_keys_and_values_count_times_their_scales() -> None:
    problem = Problem(Sizes(query_lens=(1, 3), seq_lens=(20, 40), num_heads=1))
    plain = problem.prefill(SMALL_QUERY_TILES)
    decoder = Problem(decode_sizes(20, 40, num_heads=1))
    plain_decoded = decoder.decode(SMALL_TILES)
    problem.cache[:, :, 0] /= 2
    problem.cache[:, :, 1] /= 4
    decoder.cache[:, :, 0] /= 2
    decoder.cache[:, :, 1] /= 4
    torch.testing.assert_close(problem.prefill(SMALL_QUERY_TILES, key_scale=2.0, value_scale=4.0), plain)
    torch.testing.assert_close(decoder.decode(SMALL_TILES, key_scale=2.0, value_scale=4.0), plain_decoded)


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("sliding_window", [None, 1, 19])
def test_prefill_equals_reference_on_mixed_batches(block_size: int, sliding_window: int | None) -> None:
    sizes = Sizes(query_lens=(1, 5, 37, 0, 1, 3), seq_lens=(60, 5, 59, 9, 1, 43), block_size=block_size, sliding_window=sliding_window)
    problem = Problem(sizes)
    problem.assert_close(problem.prefill(SMALL_QUERY_TILES))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 64), (7, 1, 80), (6, 3, 96), (20, 1, 64), (4, 2, 128), (2, 1, 256)]
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_prefill_of_all_head_sizes_and_ratios(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    sizes = Sizes(query_lens=(9, 1), seq_lens=(40, 18), num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    problem = Problem(sizes)
    problem.assert_close(problem.prefill())


def test_prefill_caps_scores() -> None:
    problem = Problem(Sizes(query_lens=(9, 20), seq_lens=(40, 20), soft_cap=1.5))
    problem.assert_close(problem.prefill(SMALL_QUERY_TILES))


def test_prefill_finds_sequences_beyond_the_first_chunk_of_starts() -> None:
    lens = (1, 2, 0) * 50
    problem = Problem(Sizes(query_lens=lens, seq_lens=tuple(2 * n + 1 for n in lens), num_heads=1, block_size=8))
    problem.assert_close(problem.prefill(SMALL_QUERY_TILES))


def test_prefill_leaves_rows_outside_its_sequences_alone() -> None:
    problem = Problem(Sizes(query_lens=(2, 6, 3), seq_lens=(30, 20, 9)))
    expected = problem.expected()
    problem.block_tables, problem.seq_lens = problem.block_tables[1:2], problem.seq_lens[1:2]
    problem.query_start_loc = problem.query_start_loc[1:3]
    actual = problem.prefill(SMALL_QUERY_TILES)
    torch.testing.assert_close(actual[2:8], expected[2:8], atol=2e-5, rtol=2e-5)
    assert bool(actual[:2].isnan().all())
    assert bool(actual[8:].isnan().all())


@pytest.mark.parametrize("num_decodes", [0, 1, 3, 4])
def test_single_queries_are_decoded_and_longer_runs_prefilled(num_decodes: int) -> None:
    query_lens = (*(1,) * num_decodes, *(5, 17)[: 4 - num_decodes])
    seq_lens = tuple(query + 30 * index for index, query in enumerate(query_lens))
    problem = Problem(Sizes(query_lens=query_lens, seq_lens=seq_lens, sliding_window=50))
    problem.assert_close(problem.mixed(num_decodes))


@pytest.mark.parametrize("num_blocks", [0, 1, 4])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_shared_prefix_is_read_once_and_counts_for_all(num_blocks: int, num_parts: int) -> None:
    problem = Problem(decode_sizes(70, 65, 0, 200, 131, num_heads=6, num_kv_heads=2, soft_cap=20.0))
    problem.assert_close(problem.decode_shared(problem.share(num_blocks), PrefixConfig(SMALL_QUERY_TILES, num_parts)))


@pytest.mark.parametrize("alone", [(0,), (2, 3), (0, 1, 2, 3, 4, 5)])
def test_sequences_that_do_not_begin_with_the_prefix_read_their_own_keys(alone: tuple[int, ...]) -> None:
    problem = Problem(decode_sizes(20, 65, 131, 7, 90, 0, 100, num_heads=6, num_kv_heads=2, block_size=8))
    problem.assert_close(problem.decode_shared(problem.share(5, (0, 3, *alone)), PrefixConfig(SMALL_QUERY_TILES, 2)))


def test_a_prefix_scales_what_is_stored_as_all_keys_do() -> None:
    problem = Problem(decode_sizes(70, 90, num_heads=1))
    prefix = problem.share(3)
    expected = problem.decode_shared(prefix)
    problem.cache[:, :, 0] /= 2
    problem.cache[:, :, 1] /= 4
    torch.testing.assert_close(problem.decode_shared(prefix, key_scale=2.0, value_scale=4.0), expected)


def test_a_tile_of_sequences_without_the_prefix_does_no_work() -> None:
    """Only the second sequence of the first tile begins with it."""
    problem = Problem(decode_sizes(*(40,) * 40, num_heads=1, block_size=8))
    alone = (0, *range(2, 40))
    workspace = torch.full((40 * 4 * 65,), float("nan"))
    problem.assert_close(problem.decode_shared(problem.share(4, alone), PrefixConfig(SMALL_QUERY_TILES, 1), workspace=workspace))
    written = ~workspace[: 40 * 2 * 64].view(40, 2, 64).isnan().any(dim=2)
    assert written[:, 0].tolist() == [True] * 16 + [False] * 24, "tiles of 16 sequences"


def test_settings_for_a_shared_prefix_are_chosen() -> None:
    problem = Problem(decode_sizes(150, 150, num_heads=5, head_dim=80))
    workspace = torch.full((2 * 5 * 40 * 81,), float("nan"))
    problem.assert_close(problem.decode_shared(problem.share(8), workspace=workspace))


@pytest.mark.parametrize("num_cached", [0, 1, 37, 16, 32 + 48, 2 * 32 + 16 + 5])
@pytest.mark.parametrize("num_queries", [32, 35])
@pytest.mark.parametrize("num_heads", [2, 6])
def test_a_gathered_run_equals_reference(num_cached: int, num_queries: int, num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NaN in every slot that no query sees, also in those that are gathered."""
    monkeypatch.setattr(attention_prefill_cudnn, "LENGTH_UNIT", 16)
    monkeypatch.setattr(attention_prefill_cudnn, "PIECE_LENGTHS", (32, 16))
    seq_len = num_queries + num_cached
    sizes = Sizes(query_lens=(num_queries,), seq_lens=(seq_len,), num_heads=num_heads, num_kv_heads=2, head_dim=80, block_size=8)
    problem = Problem(sizes)
    out = torch.full_like(problem.query, float("nan"))
    assert problem.prefill_cudnn(out=out) is out
    problem.assert_close(out)
    problem.assert_close(problem.prefill_cudnn())


@pytest.mark.parametrize("config", [SMALL_TILES, ONE_SPLIT])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 64), (7, 1, 80)])
def test_each_element_is_stored_at_its_place(config: DecodeConfig, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    problem = Problem(decode_sizes(1, 70, 0, 90, **heads))
    problem.assert_placed(partial(problem.decode, config))
    problem.assert_placed(partial(problem.decode_shared, problem.share(2, (0,)), PrefixConfig(SMALL_QUERY_TILES, 2)))


def test_places_that_do_not_fit_are_refused() -> None:
    problem = Problem(decode_sizes(20, 40))
    for places in (torch.arange(191).int(), torch.arange(192), torch.arange(384).int()[::2]):
        with pytest.raises(ValueError, match=r"must be \(192,\) int32, contiguous"):
            problem.decode(SMALL_TILES, out_places=places)
    with pytest.raises(ValueError, match="heads of a token must be contiguous"):
        problem.decode(SMALL_TILES, out=torch.empty(2, 6, 64)[:, ::2], out_places=torch.arange(192).int())


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_caches_of_float8_equal_the_reference(dtype: torch.dtype) -> None:
    """With NaN in every slot that no query sees."""
    common = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 80, "dtype": dtype, "cache_dtype": FLOAT8}
    problem = Problem(decode_sizes(70, 65, 0, 130, **common))
    problem.assert_close(problem.decode(SMALL_TILES))
    problem.assert_close(problem.decode_shared(problem.share(2), PrefixConfig(SMALL_QUERY_TILES, 2)))
    problem = Problem(Sizes(query_lens=(1, 5, 37), seq_lens=(60, 5, 59), sliding_window=40, **common))
    problem.assert_close(problem.prefill(SMALL_QUERY_TILES))
    problem = Problem(Sizes(query_lens=(35,), seq_lens=(1100,), **common))
    problem.assert_close(problem.prefill_cudnn())


def test_every_float8_is_read_as_what_it_is() -> None:
    """One key a sequence: the output is its value, each of the 256."""
    problem = Problem(decode_sizes(*(1,) * 4, num_heads=1, cache_dtype=FLOAT8))
    codes = torch.arange(256, dtype=torch.uint8).view(FLOAT8)
    problem.values(problem.cache)[problem.block_tables[:, 0].long(), 0] = codes.view(4, 1, 64)
    actual = problem.decode(ONE_SPLIT).flatten()
    assert actual.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(actual.nan_to_num(), codes.float().nan_to_num())


def test_nan_in_a_stored_key_or_value_reaches_the_sequence_that_sees_it() -> None:
    for part in (0, 1):
        problem = Problem(decode_sizes(20, 40, num_heads=1, cache_dtype=FLOAT8))
        block = problem.block_tables[1, 2]
        problem.cache[block, 3, part] = float("nan")
        actual = problem.decode(SMALL_TILES)
        assert bool(actual[0].isfinite().all())
        assert bool(actual[1].isnan().all())


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lens=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), min_size=1, max_size=4).filter(lambda pairs: any(q for q, _ in pairs)),
    group=st.sampled_from([1, 3, 4]),
    block_size=st.sampled_from([8, 24, 32]),
    window=st.none() | st.integers(1, 40),
    cap=st.none() | st.floats(0.5, 30.0),
    seed=st.integers(0, 99),
)
def test_prefill_of_random_batches(lens, group: int, block_size: int, window, cap, seed: int) -> None:
    sizes = Sizes(
        query_lens=tuple(query for query, _ in lens),
        seq_lens=tuple(query + context for query, context in lens),
        num_heads=2 * group,
        num_kv_heads=2,
        block_size=block_size,
        sliding_window=window,
        soft_cap=cap,
    )
    problem = Problem(sizes, seed=seed)
    problem.assert_close(problem.prefill(SMALL_QUERY_TILES))


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seq_lens=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    group=st.sampled_from([1, 3, 4]),
    block_size=st.sampled_from([8, 24, 32]),
    window=st.none() | st.integers(1, 40),
    num_splits=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_decode_of_random_batches(seq_lens, group: int, block_size: int, window, num_splits: int, seed: int) -> None:
    problem = Problem(
        decode_sizes(*seq_lens, num_heads=2 * group, num_kv_heads=2, block_size=block_size, sliding_window=window),
        seed=seed,
    )
    config = DecodeConfig(block_n=16, num_warps=4, num_stages=2, num_splits=num_splits)
    problem.assert_close(problem.decode(config, max_seq_len=100))


def test_layouts_that_do_not_fit_are_refused() -> None:
    problem = Problem(decode_sizes(20, 40))
    with pytest.raises(ValueError, match="3 parts need"):
        problem.decode(SMALL_TILES, workspace=torch.empty(10))
    with pytest.raises(ValueError, match="it must be"):
        problem.decode(SMALL_TILES, out=torch.empty(2, 3, 63))
    problem.query = problem.query.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="must be contiguous"):
        problem.decode(SMALL_TILES)
    problem = Problem(decode_sizes(20, 40))
    for table, lens in ((problem.seq_lens, problem.seq_lens[:1]), (problem.seq_lens, problem.seq_lens.long())):
        with pytest.raises(ValueError, match="prefix_lens one for each of 2 sequences"):
            problem.decode_shared((table, lens))
    problem.seq_lens = problem.seq_lens.long()
    with pytest.raises(ValueError, match="must be int32"):
        problem.prefill(SMALL_QUERY_TILES)


@triton.jit
def _first_step_kernel(seen_ptr, out_ptr, score_scale) -> None:
    """The weights of two rows after their first tile of 16 keys."""
    places = tl.arange(0, 2)[:, None] * 16 + tl.arange(0, 16)[None, :]
    maxima = tl.full([2], UNSEEN, tl.float32)
    weights, _, _ = softmax_step(tl.full([2, 16], 3.0, tl.float32), tl.load(seen_ptr + places) > 0, maxima, score_scale, 0.0, False, True)
    tl.store(out_ptr + places, weights)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_a_row_that_has_seen_no_key_yet_has_no_weights(head_dim: int) -> None:
    """Were its maximum that of its hidden keys, each had the weight 2^x of a rounding error x, which may be infinite."""
    seen = torch.zeros(2, 16, dtype=torch.int32)
    seen[1, 4:] = 1
    weights = torch.full((2, 16), float("nan"))
    _first_step_kernel[(1,)](seen, weights, ScoreScale.of(head_dim**-0.5, 1.0, None).score_scale)
    assert torch.equal(weights, seen.float())
