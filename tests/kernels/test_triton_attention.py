"""The attention kernels: interpreted checks, compiled for every card, and the choice of launch settings."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from pagedcore_kernels.triton_ops.attention_common import Card, ScoreScale
from pagedcore_kernels.triton_ops.attention_prefill_cudnn import RunInPieces
from pagedcore_kernels.triton_ops.attention_settings import (
    MAX_STORED_IN_ORDER,
    DecodeConfig,
    DecodeShape,
    PrefillShape,
    choose_decode_config,
    choose_prefill_config,
    choose_prefix_config,
    decode_workspace_size,
    decodes_to_warm,
    num_query_tiles,
    share_of_split,
    shrink_to_shared,
)
from support.attention_problems import Problem, Sizes
from support.triton_compile import CAPABILITIES, Compiled, compile_op
from support.triton_interpreter import run_interpreted

FLOAT8 = torch.float8_e4m3fn
H200 = Card(90, 132)
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}


@pytest.mark.slow
def test_kernels_equal_the_reference_under_the_interpreter() -> None:
    run_interpreted("attention.py", "-m", "not slow")


@pytest.mark.slow
def test_kernels_equal_the_reference_on_random_batches_under_the_interpreter() -> None:
    run_interpreted("attention.py", "-m", "slow")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_decode_compiles_within_the_shared_memory_of_each_card(capability: int) -> None:
    check_decode_compiles(capability, num_heads=7, num_kv_heads=1, head_dim=128, max_seq_len=32768)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "max_seq_len"), [(4, 4, 128, 2048), (2, 1, 256, 300), (2, 1, 64, 2000)])
def test_decode_of_other_shapes_compiles_for_each_card(capability, num_heads, num_kv_heads, head_dim, max_seq_len) -> None:
    check_decode_compiles(capability, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, max_seq_len=max_seq_len)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_decode_of_many_sequences_compiles_for_each_card(capability: int) -> None:
    check_many_sequences_compile(capability, 7, 128, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "dtype", "cache_dtype"),
    [
        (1, 128, torch.bfloat16, None),
        (16, 64, torch.float16, None),
        (16, 128, torch.float16, None),
        (20, 128, torch.bfloat16, None),
        (2, 256, torch.bfloat16, None),
        (3, 80, torch.float32, None),
        (7, 128, torch.bfloat16, FLOAT8),
        (7, 96, torch.float16, FLOAT8),
    ],
)
def test_many_sequences_of_other_shapes_compile_for_each_card(capability: int, num_heads: int, head_dim: int, dtype, cache_dtype) -> None:
    check_many_sequences_compile(capability, num_heads, head_dim, dtype, cache_dtype)


def check_many_sequences_compile(
    capability: int, num_heads: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype | None = None
) -> None:
    """With the tile that is chosen where there are programs enough: few warps, which must hold their sums."""
    config = choose_decode_config(DecodeShape(600, num_heads, 1, head_dim, dtype.itemsize, 4096), Card(capability, 108))
    problem = small_problem(num_heads, 1, head_dim, dtype, cache_dtype=cache_dtype)
    (kernel,) = compile_op(lambda: problem.decode(config), capability)
    assert_fits([kernel], capability, max_stack_bytes=96)


def check_decode_compiles(capability: int, *, num_heads: int, num_kv_heads: int, head_dim: int, max_seq_len: int) -> None:
    problem = small_problem(num_heads, num_kv_heads, head_dim, torch.bfloat16)
    compiled = compile_op(lambda: problem.decode(max_seq_len=max_seq_len), capability)
    assert [kernel.name for kernel in compiled] == ["_attend_split", "_merge_parts"]
    assert_fits(compiled, capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_prefill_compiles_within_the_shared_memory_of_each_card(capability: int) -> None:
    check_prefill_compiles(capability, query_len=200, num_heads=7, head_dim=128)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("query_len", "num_heads", "head_dim"), [(200, 1, 256), (200, 1, 64), (1, 7, 128)])
def test_prefill_of_other_shapes_compiles_for_each_card(capability: int, query_len: int, num_heads: int, head_dim: int) -> None:
    check_prefill_compiles(capability, query_len=query_len, num_heads=num_heads, head_dim=head_dim)


def check_prefill_compiles(capability: int, *, query_len: int, num_heads: int, head_dim: int) -> None:
    sizes = Sizes(query_lens=(query_len,), seq_lens=(300,), num_heads=num_heads, head_dim=head_dim, dtype=torch.bfloat16)
    assert_fits(compile_op(Problem(sizes).prefill, capability), capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_that_store_in_an_order_compile_for_each_card(capability: int) -> None:
    ones, lens, places = (1,) * 40, (40,) * 40, torch.arange(7 * 128).int()
    problem = Problem(Sizes(query_lens=ones, seq_lens=lens, num_heads=7, head_dim=128, dtype=torch.float16))
    for num_sequences in (13, 16, 600):  # none is split: up to a row a multiprocessor, up to one and a half, many
        config = choose_decode_config(DecodeShape(num_sequences, 56, 8, 128, 2, 4096), Card(capability, 108))
        (kernel,) = compile_op(lambda config=config: problem.decode(replace(config, num_splits=1), out_places=places), capability)
        assert_fits([kernel], capability, max_stack_bytes=96)
    merged = compile_op(lambda: problem.decode_shared(problem.share(1), out_places=places), capability)
    assert "_merge_parts" in {kernel.name for kernel in merged}
    assert_fits(merged, capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("num_sequences", [2, 40])
def test_shared_prefixes_compile_within_the_shared_memory_of_each_card(capability: int, num_sequences: int) -> None:
    ones, lens = (1,) * num_sequences, (40,) * num_sequences
    problem = Problem(Sizes(query_lens=ones, seq_lens=lens, num_heads=7, head_dim=128, dtype=torch.bfloat16))
    compiled = compile_op(lambda: problem.decode_shared(problem.share(1)), capability)
    assert [kernel.name for kernel in compiled] == ["_attend_prefix", "_attend_split", "_merge_parts"]
    assert_fits(compiled, capability)


@pytest.mark.parametrize("capability", [80, 90])
def test_the_merge_of_gathered_runs_compiles(capability: int) -> None:
    problem = Problem(Sizes(query_lens=(20,), seq_lens=(2070,), head_dim=128, dtype=torch.bfloat16))
    assert_fits(compile_op(problem.prefill_cudnn, capability), capability)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_windows_and_caps_compile(dtype: torch.dtype) -> None:
    sizes = Sizes(query_lens=(200,), seq_lens=(300,), head_dim=80, dtype=dtype, sliding_window=64, soft_cap=30.0, block_size=24)
    assert_fits(compile_op(Problem(sizes).prefill, 86), 86)
    problem = small_problem(3, 1, 80, dtype, sliding_window=64, soft_cap=30.0)
    assert_fits(compile_op(lambda: problem.decode(max_seq_len=4096), 86), 86)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_caches_of_eight_bits_compile_for_each_card(capability: int) -> None:
    problem = small_problem(7, 1, 128, torch.bfloat16, cache_dtype=FLOAT8)
    check_float8_reading(compile_op(lambda: problem.decode(max_seq_len=4096), capability)[:1], capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("num_heads", "head_dim", "dtype"), [(7, 128, torch.bfloat16), (2, 256, torch.bfloat16), (3, 80, torch.float16)])
def test_caches_of_eight_bits_compile_in_other_shapes(capability: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    check_float8_compiles(capability, num_heads, head_dim, dtype)


def check_float8_compiles(capability: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    problem = small_problem(num_heads, 1, head_dim, dtype, cache_dtype=FLOAT8)
    long = Problem(Sizes(query_lens=(200,), seq_lens=(300,), num_heads=num_heads, head_dim=head_dim, dtype=dtype, cache_dtype=FLOAT8))
    compiled = [
        *compile_op(lambda: problem.decode(max_seq_len=32768), capability),
        *compile_op(problem.prefill, capability),
        *compile_op(long.prefill, capability),
        *compile_op(lambda: problem.decode_shared(problem.share(1)), capability),
    ]
    readers = [kernel for kernel in compiled if kernel.name != "_merge_parts"]
    assert len(readers) == 5
    # Decoding bytes of the widest heads takes more registers than there are; slow, and only on cards before sm_89.
    check_float8_reading(readers, capability, max_stack_bytes=600 if head_dim > 128 and capability < 89 else 96)


def check_float8_reading(compiled: list[Compiled], capability: int, max_stack_bytes: int = 96) -> None:
    """Cards without the type get bytes and decode them; values go through shared memory in 16 bits, never byte by byte."""
    assert_fits(compiled, capability, max_stack_bytes)
    for kernel in compiled:
        assert ("cvt.rn.f16x2.e4m3x2" in kernel.ptx) == (capability >= 89)
        assert "ld.shared.b8" not in kernel.ptx
        assert "ld.shared.u8" not in kernel.ptx


def test_only_cards_that_have_it_are_asked_for_dependent_launch() -> None:
    problem = small_problem(7, 1, 64, torch.float16)
    for capability, has_it in ((80, False), (90, True)):
        for call in (lambda: problem.decode(max_seq_len=4096), problem.prefill, lambda: problem.decode_shared(problem.share(1))):
            compiled = compile_op(call, capability)
            assert all(("griddepcontrol.wait" in kernel.ptx) == has_it for kernel in compiled)
            assert all(("griddepcontrol.launch_dependents" in kernel.ptx) == has_it for kernel in compiled)


def test_a_first_tile_is_asked_for_before_the_wait_and_read_after_it() -> None:
    problem = small_problem(7, 1, 128, torch.bfloat16)
    ptx = compile_op(lambda: problem.decode(max_seq_len=32768), 90)[0].ptx
    assert 0 < ptx.index("prefetch.global.L2") < ptx.index("griddepcontrol.wait") < ptx.index("cp.async.cg")


def small_problem(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, **others: object) -> Problem:
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": dtype, **others}
    return Problem(Sizes(query_lens=(1, 1), seq_lens=(40, 20), **sizes))


def assert_fits(compiled: list[Compiled], capability: int, max_stack_bytes: int = 64) -> None:
    for kernel in compiled:
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel.name
        assert kernel.stack_bytes <= max_stack_bytes, f"{kernel.name} spills into {kernel.stack_bytes} bytes a thread"


@pytest.mark.parametrize(
    ("num_sequences", "num_kv_heads", "max_seq_len", "num_splits"),
    [
        (64, 4, 2048, 1),
        (1, 4, 32768, 64),
        (8, 4, 2048, 4),
        (256, 4, 1024, 1),
        (8, 8, 2048, 2),
        (1, 4, 16, 1),
        (1, 1, 131072, 128),
        (3, 2, 0, 1),
    ],
)
def test_a_context_is_split_until_the_card_is_busy(num_sequences: int, num_kv_heads: int, max_seq_len: int, num_splits: int) -> None:
    shape = DecodeShape(num_sequences, 7 * num_kv_heads, num_kv_heads, 128, 2, max_seq_len)
    config = choose_decode_config(shape, H200)
    assert config.num_splits == num_splits
    assert config.prefetch == (num_sequences * num_kv_heads * num_splits <= 3 * 132)
    assert not choose_decode_config(shape, Card(86, 84)).prefetch, "no kernel starts early there"


@pytest.mark.parametrize(("num_keys", "num_splits", "share"), [(0, 3, 32), (1, 1, 32), (33, 1, 64), (200, 3, 96), (32768, 99, 352)])
def test_shares_are_whole_units_that_cover_the_context(num_keys: int, num_splits: int, share: int) -> None:
    assert share_of_split(num_keys, num_splits) == share
    assert share * num_splits >= num_keys


@pytest.mark.parametrize(("num_sequences", "max_prefix_len", "num_parts"), [(256, 2048, 2), (8, 32768, 32), (8, 300, 1)])
def test_a_prefix_is_parted_until_the_card_is_busy(num_sequences: int, max_prefix_len: int, num_parts: int) -> None:
    assert choose_prefix_config(PrefillShape(7, 128, 2, num_sequences), 4, max_prefix_len, H200).num_parts == num_parts


@pytest.mark.parametrize(
    ("num_sequences", "num_heads", "max_seq_len", "tile"),
    [
        (1, 16, 400, (128, 4, 5, 4)),
        (10, 16, 4096, (128, 4, 5, 1)),
        (10, 16, 32768, (64, 4, 5, 3)),
        (10, 136, 4096, (64, 4, 5, 3)),
        (20, 16, 4096, (64, 2, 5, 2)),
        (28, 16, 4096, (64, 2, 3, 2)),
        (28, 24, 4096, (64, 8, 5, 1)),
        (28, 8, 4096, (64, 2, 5, 3)),
        (28, 8, 1024, (64, 2, 3, 2)),
        (28, 8, 32768, (64, 4, 3, 2)),
        (20, 16, 32768, (128, 4, 3, 2)),
        (48, 16, 300, (64, 2, 5, 1)),
        (64, 16, 300, (64, 2, 3, 1)),
        (80, 16, 40960, (64, 2, 5, 1)),
        (80, 8, 40960, (64, 2, 5, 1)),
        (80, 136, 40960, (64, 4, 3, 1)),
        (64, 136, 300, (64, 4, 3, 1)),
    ],
)
def test_tiles_are_those_that_were_measured(num_sequences: int, num_heads: int, max_seq_len: int, tile: tuple[int, ...]) -> None:
    config = choose_decode_config(DecodeShape(num_sequences, num_heads, 8, 128, 2, max_seq_len), H200)
    assert (config.block_n, config.num_warps, config.num_stages, config.num_splits) == tile


@pytest.mark.parametrize("card", [H200, Card(80, 108), Card(86, 84), Card(89, 142), Card(120, 170)])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "max_seq_len"), [(16, 8, 40960), (28, 4, 32768), (32, 32, 4096), (14, 2, 300), (71, 1, 2048)]
)
def test_a_few_decodes_meet_every_kernel(card: Card, num_heads: int, num_kv_heads: int, max_seq_len: int) -> None:
    whole = DecodeShape(200, num_heads, num_kv_heads, 128, 2, max_seq_len)
    decodes = decodes_to_warm(whole, card)
    assert len(decodes) <= 24
    met = {kernel for decode in decodes for kernel in decode_kernels(whole, *decode, card)}
    contexts = {*range(1, 700, 33), *(length for length in (777, 1030, 5000, 8192, 9000, 32768) if length <= max_seq_len)}
    for num_sequences, context in product(range(1, 201), sorted(contexts)):
        assert decode_kernels(whole, num_sequences, min(context, max_seq_len), card) <= met, (num_sequences, context)
    for window in (33, 600, 1500):  # layers that see so many keys of the same contexts
        seen = {kernel for count, context in decodes for kernel in decode_kernels(whole, count, min(context, window), card)}
        for num_sequences, context in product(range(1, 201, 3), sorted(context for context in contexts if context <= window)):
            assert decode_kernels(whole, num_sequences, min(context, max_seq_len), card) <= seen, (window, num_sequences, context)


def decode_kernels(whole: DecodeShape, num_sequences: int, context: int, card: Card) -> set[object]:
    """What tells the compiled kernels of a call from those of others."""
    config = choose_decode_config(replace(whole, num_sequences=num_sequences, max_seq_len=context), card)
    is_split = config.num_splits > 1
    are_few = num_sequences <= MAX_STORED_IN_ORDER
    attends = (config.block_n, config.num_warps, config.num_stages, config.prefetch, is_split, are_few)
    parts = 1 << (config.num_splits - 1).bit_length()
    return {attends, ("merge", parts, num_sequences < 64, are_few)} if is_split else {attends}


@pytest.mark.parametrize(("card", "head_dim", "num_stages"), [(Card(80, 108), 128, 3), (Card(80, 108), 64, 5), (Card(86, 84), 64, 3)])
def test_many_rows_have_two_tiles_in_flight_where_three_programs_have_room_for_them(card: Card, head_dim: int, num_stages: int) -> None:
    config = choose_decode_config(DecodeShape(400, 16, 8, head_dim, 2, 40960), card)
    assert (config.block_n, config.num_warps, config.num_stages) == (64, 2, num_stages)


def test_stages_go_before_the_tile_shrinks() -> None:
    wide = DecodeConfig(block_n=128, num_warps=8, num_stages=7, num_splits=1)
    assert shrink_to_shared(wide, 512, 227 * 1024) == wide
    assert shrink_to_shared(wide, 512, 163 * 1024) == DecodeConfig(128, 8, 5, 1)
    assert shrink_to_shared(wide, 512, 99 * 1024) == DecodeConfig(128, 8, 3, 1)
    assert shrink_to_shared(wide, 2048, 99 * 1024) == DecodeConfig(32, 8, 3, 1)


def test_workspace_holds_a_row_and_a_log_sum_for_each_part() -> None:
    assert decode_workspace_size(2, 3, 64, 1) == 0
    assert decode_workspace_size(2, 3, 64, 5) == 2 * 3 * 5 * 65


def test_query_tiles_hold_whole_groups_and_no_more_rows_than_there_are() -> None:
    assert choose_prefill_config(PrefillShape(7, 128, 2, 8192), H200).block_m == 128
    assert choose_prefill_config(PrefillShape(7, 128, 2, 1), H200).block_m == 16
    assert choose_prefill_config(PrefillShape(20, 128, 2, 1), H200).block_m == 32
    assert choose_prefill_config(PrefillShape(64, 128, 4, 1), Card(86, 84)).block_m == 64


@pytest.mark.parametrize("query_lens", [(1,), (18, 18), (17, 1, 19, 0), (1,) * 9, (100,)])
def test_there_is_a_program_for_every_tile_of_queries(query_lens: tuple[int, ...]) -> None:
    tile = 18
    starts, first = [], 0
    for index, query_len in enumerate(query_lens):
        starts.append((first // tile + index, -(-query_len // tile)))
        first += query_len
    last_tile = max(start + count for start, count in starts)
    assert all(start + count <= following for (start, count), (following, _) in pairwise(starts))
    assert num_query_tiles(sum(query_lens), len(query_lens), max(query_lens), tile) >= last_tile
    assert num_query_tiles(4096, len(query_lens), max(query_lens), tile) >= last_tile, "with padding tokens"


def test_cudnn_meets_few_lengths_and_every_key_once() -> None:
    lengths = set()
    for num_queries, num_cached in product((4096, 4097, 5000, 7936, 8192), (0, 1, 1023, 1024, 7936, 8192, 24_576, 31_337)):
        run = RunInPieces.of(num_queries, num_cached)
        assert [begin for begin, _ in run.pieces] + [num_cached - run.front] == [0] + [end for _, end in run.pieces], "without a gap"
        assert run.front < 1024
        assert 0 <= run.width - run.front - num_queries < 1024
        lengths |= {(run.width, end - begin) for begin, end in run.pieces} | {(run.width, run.width)}
    assert {width for width, _ in lengths} <= {4096, 5120, 6144, 7168, 8192, 9216}
    assert {length for width, length in lengths if length != width} <= {8192, 4096, 2048, 1024}


def test_a_soft_cap_folds_into_two_constants() -> None:
    assert ScoreScale.of(0.5, 1.0, None) == ScoreScale(0.5 * 1.4426950408889634, 0.0)
    assert ScoreScale.of(0.5, 2.0, 4.0) == ScoreScale(0.5 * 1.4426950408889634, 4 * 1.4426950408889634)
    for scale, cap in ((0.0, None), (-1.0, None), (1.0, 0.0)):
        with pytest.raises(ValueError, match="must be above 0"):
            ScoreScale.of(scale, 1.0, cap)
