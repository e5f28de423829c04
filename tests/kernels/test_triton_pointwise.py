"""Norms, the gate, rotation with KV write and step inputs: interpreted checks, compiled for every card, launch settings, refusals."""

from __future__ import annotations

import pytest
import torch

from pagedcore_kernels.reference.step_inputs import DecodeInputs
from pagedcore_kernels.triton_ops.activation import silu_mul
from pagedcore_kernels.triton_ops.norms import NormLaunch, add_rms_norm, choose_norm_launch, rms_norm
from pagedcore_kernels.triton_ops.norms_in_order import add_rms_norm_in_order, choose_num_parts
from pagedcore_kernels.triton_ops.rotary_kv import choose_heads_per_program, rotate_and_write_kv
from pagedcore_kernels.triton_ops.step_inputs import prepare_decode_inputs, write_sampled
from support.triton_compile import CAPABILITIES, Compiled, compile_op
from support.triton_interpreter import run_interpreted

BF16 = torch.bfloat16


def test_kernels_equal_their_references_under_the_interpreter() -> None:
    run_interpreted("pointwise.py")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_without_spills(capability: int) -> None:
    x, weight, order = torch.empty(3, 1024, dtype=BF16), torch.empty(1024, dtype=BF16), torch.arange(1024).int()
    wide = torch.empty(3, 16384, dtype=torch.float32)
    compiled = [
        *compile_op(lambda: add_rms_norm(x, x.clone(), weight, eps=1e-6), capability),
        *compile_op(lambda: rms_norm(wide, wide[0], eps=1e-6), capability),
        *compile_op(lambda: add_rms_norm_in_order(x, x.clone(), weight, order, eps=1e-6), capability),
        *compile_in_order(64, 4096, torch.float32, capability),
        *compile_in_order(64, 8192, BF16, capability),
        *compile_in_order(20, 5120, torch.float32, capability),
        *compile_op(lambda: silu_mul(x), capability),
        *compile_op(lambda: rotate(num_tokens=1, head_dim=128), capability),
        *compile_op(lambda: rotate(num_tokens=64, head_dim=80), capability),
        *compile_op(prepare, capability),
    ]
    assert len({kernel.name for kernel in compiled}) == 6
    assert_light(compiled)


def compile_in_order(num_rows: int, dim: int, dtype: torch.dtype, capability: int) -> list[Compiled]:
    x, order = torch.empty(num_rows, dim, dtype=dtype), torch.arange(dim).int()
    return compile_op(lambda: add_rms_norm_in_order(x, x.clone(), x[0], order, eps=1e-6), capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_longer_rows_are_put_in_order_by_a_launch_of_their_own(capability: int) -> None:
    assert {kernel.name for kernel in compile_in_order(2, 16384, BF16, capability)} == {"_norm_kernel", "_take_columns_kernel"}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_caches_of_eight_bits_compile(capability: int) -> None:
    compiled = compile_op(lambda: rotate(num_tokens=1, head_dim=128, cache_dtype=torch.float8_e4m3fn), capability)
    assert_light(compiled)
    assert "min.NaN." in compiled[0].ptx, "a plain minimum hides NaN"


def test_long_rows_are_read_in_sixteen_bytes_a_thread() -> None:
    x, weight = torch.empty(3, 4096, dtype=BF16), torch.empty(4096, dtype=BF16)
    (norm,) = compile_op(lambda: add_rms_norm(x, x.clone(), weight, eps=1e-6), 90)
    (gate,) = compile_op(lambda: silu_mul(x), 90)
    for kernel in (norm, gate):
        assert "ld.global.v4.b32" in kernel.ptx
        assert "st.global.v4.b32" in kernel.ptx
        assert "ld.global.b16" not in kernel.ptx


def assert_light(compiled: list[Compiled]) -> None:
    for kernel in compiled:
        assert kernel.stack_bytes == 0, f"{kernel.name} spills"
        assert kernel.shared_bytes <= 16 * 1024, kernel.name


def rotate(*, num_tokens: int, head_dim: int, cache_dtype: torch.dtype = BF16, **changes: object) -> None:
    cache = torch.zeros(4, 16, 16, head_dim, dtype=cache_dtype)
    norm, numbers = torch.empty(head_dim, dtype=BF16), torch.zeros(num_tokens, dtype=torch.int64)
    arguments = {
        "qkv": torch.empty(num_tokens, 32, head_dim, dtype=BF16),
        "cos_sin": torch.empty(40, head_dim, dtype=BF16),
        "positions": numbers,
        "slot_mapping": numbers,
        "key_cache": cache[:, :, :8],
        "value_cache": cache[:, :, 8:],
        "num_heads": 16,
        "query_norm": norm,
        "key_norm": norm,
    }
    rotate_and_write_kv(**(arguments | changes))


def prepare() -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32)

    numbers = torch.zeros(8, dtype=torch.int64)
    out = DecodeInputs.allocate(8, 300, "cpu")
    prepare_decode_inputs(zeros(8, 4801), zeros(8, 300), zeros(8), numbers, block_size=16, out=out)
    write_sampled(numbers, numbers, numbers, zeros(8, 4801), zeros(8))


@pytest.mark.parametrize(
    ("dim", "launch"),
    [
        (1, NormLaunch(1, 1024, 4)),
        (128, NormLaunch(128, 8, 4)),
        (1024, NormLaunch(1024, 1, 4)),
        (4096, NormLaunch(4096, 1, 8)),
        (5120, NormLaunch(8192, 1, 16)),
        (16384, NormLaunch(16384, 1, 16)),
    ],
)
def test_short_rows_share_a_program_and_long_ones_get_more_warps(dim: int, launch: NormLaunch) -> None:
    assert choose_norm_launch(dim) == launch


def test_a_row_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="16385 elements; they may have 1 to 16384"):
        choose_norm_launch(16385)


def test_few_tokens_are_spread_over_more_programs() -> None:
    assert [choose_heads_per_program(tokens, 128) for tokens in (1, 63, 64, 4096)] == [2, 2, 8, 8]
    assert [choose_heads_per_program(64, dim) for dim in (64, 80, 256)] == [16, 8, 4]
    assert choose_heads_per_program(1, 256) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 15}, "is not 15 query heads"),
        ({"value_cache": torch.zeros(4, 16, 4, 128, dtype=BF16)}, "must be alike"),
        ({"cos_sin": torch.zeros(40, 64, dtype=BF16)}, r"must be \[P, 128\]"),
        ({"cos_sin": torch.zeros(40, 128)}, r"must be \[P, 128\] torch.bfloat16"),
        ({"positions": torch.zeros(2, dtype=torch.int32)}, "must be contiguous int64"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int64)}, "one for each of 2 tokens"),
        ({"key_norm": None}, "come together"),
        ({"out": torch.zeros(2, 8, 128, dtype=BF16)}, "out is"),
        ({"qkv": torch.empty(2, 128, 32, dtype=BF16).transpose(1, 2)}, "last dimension"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotate(num_tokens=2, head_dim=128, **changes)


@pytest.mark.parametrize(("num_rows", "dim", "parts"), [(1, 4096, 4), (16, 4096, 4), (17, 4096, 2), (33, 4096, 1), (1, 64, 2), (1, 16, 1)])
def test_few_rows_are_shared_by_programs(num_rows: int, dim: int, parts: int) -> None:
    assert choose_num_parts(num_rows, dim) == parts


def test_a_norm_in_order_refuses_what_it_cannot_read() -> None:
    x, ones, order = torch.zeros(4, 8), torch.ones(8), torch.arange(8).int()
    for bad_x, residual, weight, bad_order, message in (
        (x[None], None, ones, order, "must be a matrix"),
        (x.t(), None, torch.ones(4), torch.arange(4).int(), "contiguous rows"),
        (x, x[:2], ones, order, "residual like it"),
        (x, x.half(), ones, order, "must be alike"),
        (x, None, torch.ones(6), order, "weight and order must be"),
        (x, None, ones, torch.arange(16).int()[::2], "weight and order must be"),
        (x, None, ones, order.long(), "must be int32"),
    ):
        with pytest.raises(ValueError, match=message):
            add_rms_norm_in_order(bad_x, residual, weight, bad_order, eps=1e-6)


def test_norms_and_gate_refuse_what_they_cannot_read_in_place() -> None:
    x = torch.zeros(4, 6, 8)
    with pytest.raises(ValueError, match="last one or two dimensions"):
        rms_norm(x, torch.ones(6), eps=1e-6)
    with pytest.raises(ValueError, match="must be contiguous"):
        rms_norm(x.transpose(1, 2), torch.ones(6), eps=1e-6)
    with pytest.raises(ValueError, match="no view of evenly spaced rows"):
        rms_norm(x[:, :3], torch.ones(8), eps=1e-6)
    with pytest.raises(ValueError, match="must be alike"):
        add_rms_norm(x, x.half(), torch.ones(8), eps=1e-6)
    with pytest.raises(ValueError, match="out is"):
        rms_norm(x, torch.ones(8), eps=1e-6, out=torch.zeros(4, 8))
    with pytest.raises(ValueError, match="gate_up must be contiguous"):
        silu_mul(x[:, :3])
    with pytest.raises(ValueError, match="out is"):
        silu_mul(x, out=torch.zeros(4, 6, 8))


def test_step_inputs_refuse_other_dtypes_and_shapes() -> None:
    tokens, lengths, rows = torch.zeros(3, 33, dtype=torch.int32), torch.ones(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    out = DecodeInputs.allocate(2, 4, "cpu")
    table = torch.zeros(3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"out.block_tables is \(2, 4\)"):
        prepare_decode_inputs(tokens, table[:, :3], lengths, rows, block_size=8, out=out)
    with pytest.raises(ValueError, match="rows must be contiguous int64"):
        prepare_decode_inputs(tokens, table, lengths, rows.int(), block_size=8, out=out)
    with pytest.raises(ValueError, match="token_ids and lengths must be int32"):
        write_sampled(rows, rows, rows, tokens, lengths.long())
    with pytest.raises(ValueError, match="sampled and positions"):
        write_sampled(rows.int(), rows, rows, tokens, lengths)
