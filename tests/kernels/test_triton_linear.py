# ruff: noqa: E402
"""Skinny products: interpreted checks, compiled for every card, and the choice of configurations."""

from __future__ import annotations

import pytest
import torch

from support.triton_interpreter import needs_triton, run_interpreted

pytestmark = needs_triton
pytest.importorskip("triton")

from pagedcore_kernels.triton_ops import linear_settings
from pagedcore_kernels.triton_ops.attention_common import Card
from pagedcore_kernels.triton_ops.linear_settings import DotConfig, RowConfig, choose_config
from pagedcore_kernels.triton_ops.skinny_linear import skinny_linear
from pagedcore_kernels.triton_ops.split_k import SplitKWorkspace
from support.triton_compile import CAPABILITIES, Compiled, compile_op

SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
MAX_STACK_BYTES = 32
"""A few registers of a thread may be spilled where their number is limited so that more programs fit."""
ROWS_OF_BUCKET = (1, 2, 16, 32, 64)
# Each configuration of the table once, with a shape that has it.
TABLE = {(row[linear_settings.row_bucket(rows)], rows): shape for shape, row in linear_settings._SM90.items() for rows in ROWS_OF_BUCKET}


def test_kernels_equal_the_reference_under_the_interpreter() -> None:
    run_interpreted("linear.py")


# --- compiled for every card ------------------------------------------------------------------------------------------


def assert_fits(compiled: list[Compiled], capability: int) -> None:
    for kernel in compiled:
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel
        assert kernel.stack_bytes <= MAX_STACK_BYTES, kernel
        assert ("griddepcontrol" in kernel.ptx) == (capability >= 90), kernel.name


def compile_skinny(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype, capability: int, config=None) -> list[Compiled]:
    weight = torch.empty(out_features, in_features, dtype=dtype)
    x, out = torch.empty(num_rows, in_features, dtype=dtype), torch.empty(num_rows, out_features, dtype=dtype)
    return compile_op(lambda: skinny_linear(x, weight, config=config, out=out), capability)


@pytest.mark.parametrize("num_rows", ROWS_OF_BUCKET)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_skinny_products_compile_for_every_card(num_rows: int, capability: int) -> None:
    assert_fits(compile_skinny(num_rows, 1000, 5120, torch.bfloat16, capability), capability)


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "shape"), [(rows, shape) for (_, rows), shape in TABLE.items()])
def test_every_configuration_of_the_table_compiles(num_rows: int, shape: tuple[int, int]) -> None:
    assert_fits(compile_skinny(num_rows, shape[1], shape[0], torch.bfloat16, 90), 90)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 2, 64])
@pytest.mark.parametrize(("dtype", "in_features"), [(torch.float16, 4096), (torch.float32, 4096), (torch.bfloat16, 301)])
def test_other_types_and_odd_sizes_compile(num_rows: int, dtype: torch.dtype, in_features: int) -> None:
    for capability in (86, 90):
        assert_fits(compile_skinny(num_rows, 1000, in_features, dtype, capability), capability)


@pytest.mark.parametrize("config", [RowConfig(2, 2048), RowConfig(4, 256, splits=3)])
@pytest.mark.parametrize("capability", [86, 90])
def test_one_row_in_one_tile_or_split_compiles(capability: int, config: RowConfig) -> None:
    for num_rows in (1, 2) if config.holds_whole_rows(2048) else (1,):
        assert_fits(compile_skinny(num_rows, 1024, 2048, torch.bfloat16, capability, config), capability)


# --- configurations ---------------------------------------------------------------------------------------------------


def test_the_configuration_is_the_measured_one_where_there_is_one() -> None:
    assert choose_config(1, 151936, 1024, capability=90) == RowConfig(4, 1024, 2)
    assert choose_config(1, 4096, 1024, capability=90) == RowConfig(8, 1024)
    assert choose_config(2, 4096, 1024, capability=90) == RowConfig(4, 1024)
    assert choose_config(8, 4096, 4096, capability=90) == DotConfig(64, 128, splits=4)
    assert choose_config(32, 1024, 3072, capability=90) == DotConfig(64, 128, splits=4, prefetched_steps=0)


def test_other_cards_and_shapes_get_a_default() -> None:
    assert choose_config(1, 4096, 1024, capability=86) == RowConfig(4, 1024)
    assert choose_config(1, 4096, 11008, capability=90) == RowConfig(4, 1024)
    assert choose_config(1, 4096, 14336, capability=90) == RowConfig(2, 2048)
    assert choose_config(1, 50000, 4000, capability=90) == RowConfig(1, 4096, 8)
    assert choose_config(1, 50000, 2100, capability=90) == RowConfig(2, 2048)
    assert choose_config(1, 50000, 1300, capability=90) == RowConfig(4, 1024)
    assert choose_config(8, 1024, 8192, capability=90) == DotConfig(64, 128, 4, 4, splits=8, prefetched_steps=0)
    assert choose_config(8, 1024, 4096, capability=80) == DotConfig(64, 128, 4, 3, splits=8)
    assert choose_config(8, 1024, 4096, capability=89) == DotConfig(64, 64, 4, 3, splits=8)


@pytest.mark.parametrize(("num_rows", "bucket"), [(1, 0), (2, 1), (3, 2), (16, 2), (17, 3), (32, 3), (33, 4), (64, 4)])
def test_buckets_of_rows(num_rows: int, bucket: int) -> None:
    assert linear_settings.row_bucket(num_rows) == bucket


@pytest.mark.parametrize(
    ("num_rows", "in_features", "out_features", "taken"),
    [
        (64, 1024, 4096, True),
        (65, 1024, 4096, False),
        (32, 1024, 151936, True),
        (33, 1024, 151936, False),
        (16, 4096, 22016, True),
        (17, 4096, 22016, False),
        (32, 4096, 12288, True),
        (33, 4096, 12288, False),
        (64, 4096, 4096, True),
        (65, 4096, 4096, False),
        (32, 18944, 3584, True),
        (33, 18944, 3584, False),
        (0, 1024, 4096, False),
        (16, 512, 4608, True),
        (17, 512, 4608, False),
        (1, 512, 4609, True),
        (2, 512, 4609, False),
        (16, 3584, 4608, True),
        (17, 3584, 4608, False),
    ],
)
def test_products_are_taken_up_to_the_rows_that_were_measured(
    num_rows: int, in_features: int, out_features: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.empty(num_rows, in_features, dtype=torch.bfloat16)
    weight = torch.empty(out_features, in_features, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(linear_settings, "card_of", lambda device: Card(90, 132))
    assert linear_settings.takes_skinny(x, weight) is taken
    assert not linear_settings.takes_skinny(x.float(), weight.float()), "32 bit is the library's"
    monkeypatch.setattr(linear_settings, "card_of", lambda device: Card(80, 108))
    assert not linear_settings.takes_skinny(x, weight), "nobody measured that there"


def test_a_product_is_split_no_further_than_the_workspace_holds() -> None:
    workspace = SplitKWorkspace.allocate(torch.device("cpu"))
    assert workspace.fitting(8, 64, 22016, 64) == 2
    assert workspace.fitting(8, 1, 22016, 64) == 8
    assert workspace.fitting(2, 1, 1 << 20, 4) == 1


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "weight", "match"),
    [
        (torch.zeros(65, 8), torch.zeros(4, 8), "1 to 64 rows"),
        (torch.zeros(2, 8), torch.zeros(4, 9), r"\[N, 8\]"),
        (torch.zeros(2, 8), torch.zeros(4, 8).half(), "one dtype"),
        (torch.zeros(2, 8), torch.zeros(8, 4).t(), "contiguous"),
    ],
)
def test_operands_that_the_kernels_do_not_read_are_refused(x: torch.Tensor, weight: torch.Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        skinny_linear(x, weight)


@pytest.mark.parametrize(
    ("num_rows", "config", "match"),
    [(3, RowConfig(4, 8), "1 to 2"), (2, RowConfig(4, 4), "1 to 1"), (2, RowConfig(4, 8, splits=2), "1 to 1")],
)
def test_a_configuration_for_one_or_two_rows_is_refused_for_more(num_rows: int, config: RowConfig, match: str) -> None:
    with pytest.raises(ValueError, match=f"{match} rows"):
        skinny_linear(torch.zeros(num_rows, 8), torch.zeros(4, 8), config=config)


def test_a_result_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="out must be"):
        skinny_linear(torch.zeros(2, 8), torch.zeros(4, 8), out=torch.zeros(2, 5))
