# ruff: noqa: E402
"""Skinny products on a GPU: every path against plain torch, in graphs, and one after another."""

from __future__ import annotations

import pytest
import torch

from support.linear_problems import assert_product, poisoned, random_rows

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from pagedcore_kernels.triton_ops import linear_settings
from pagedcore_kernels.triton_ops.linear_settings import DotConfig, RowConfig
from pagedcore_kernels.triton_ops.skinny_linear import skinny_linear
from pagedcore_kernels.triton_ops.split_k import SplitKWorkspace, split_k_workspace

TYPES = [torch.float32, torch.float16, torch.bfloat16]
ROW_CONFIGS = [RowConfig(4, 1024), RowConfig(8, 512), RowConfig(4, 256, splits=3), RowConfig(2, 4096, 8)]
DOT_CONFIGS = [DotConfig(64, 64), DotConfig(32, 64, splits=4), DotConfig(64, 32, 4, 2, 8, 0)]


@pytest.fixture(autouse=True)
def full_precision_matmul():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)


def poisoned_workspace() -> SplitKWorkspace:
    return SplitKWorkspace(poisoned(1 << 20, dtype=torch.float32, device="cuda"), torch.zeros(4096, dtype=torch.int32, device="cuda"))


def check_skinny(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype, config=None) -> None:
    x, weight = random_rows(num_rows, in_features, dtype, "cuda"), random_rows(out_features, in_features, dtype, "cuda")
    bias = torch.randn(out_features, device="cuda").to(dtype)
    workspace = poisoned_workspace() if config else split_k_workspace(x.device)
    out = poisoned(num_rows, out_features, dtype=dtype, device="cuda")
    skinny_linear(x, weight, bias, config=config, workspace=workspace, out=out)
    assert_product(out, x.double() @ weight.double().t() + bias.double())
    assert not workspace.counters.any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 17, 64])
@pytest.mark.parametrize(("out_features", "in_features"), [(100, 301), (1000, 2056)])
def test_any_shape_with_the_configuration_that_is_chosen(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> None:
    check_skinny(num_rows, out_features, in_features, dtype)


@pytest.mark.parametrize("config", ROW_CONFIGS)
@pytest.mark.parametrize(("out_features", "in_features"), [(256, 4096), (101, 1000)])
def test_configurations_for_one_row(out_features: int, in_features: int, config: RowConfig) -> None:
    check_skinny(1, out_features, in_features, torch.bfloat16, config)


@pytest.mark.parametrize("config", [RowConfig(1, 4096), RowConfig(2, 4096, 8)])
@pytest.mark.parametrize(("out_features", "in_features"), [(256, 4096), (101, 1000)])
def test_two_rows_that_a_tile_holds_whole(out_features: int, in_features: int, config: RowConfig) -> None:
    check_skinny(2, out_features, in_features, torch.bfloat16, config)


@pytest.mark.parametrize("config", DOT_CONFIGS)
@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize(("out_features", "in_features"), [(256, 4096), (101, 1000)])
def test_configurations_for_several_rows(num_rows: int, out_features: int, in_features: int, config: DotConfig) -> None:
    check_skinny(num_rows, out_features, in_features, torch.bfloat16, config)


@pytest.mark.parametrize("shape", [shape for shape in linear_settings._SM90 if shape[1] < 100_000])
def test_shapes_of_the_table(shape: tuple[int, int]) -> None:
    for num_rows in (1, 2, 8, 32, 64):
        check_skinny(num_rows, shape[1], shape[0], torch.bfloat16)


def test_a_matrix_of_more_than_2_to_the_31_bytes_and_elements() -> None:
    weight = torch.empty(525_000, 4096, dtype=torch.bfloat16, device="cuda")  # 2.15e9 elements
    weight[-300:].normal_()
    for num_rows in (1, 8):
        x = torch.randn(num_rows, 4096, device="cuda").bfloat16()
        out = skinny_linear(x, weight)
        assert_product(out[:, -300:], x.double() @ weight[-300:].double().t())


@pytest.mark.parametrize("config", [RowConfig(4, 256, splits=4), DotConfig(32, 64, splits=8)])
def test_the_same_bits_each_time(config) -> None:
    x, weight = torch.randn(1, 4096, device="cuda").bfloat16(), torch.randn(512, 4096, device="cuda").bfloat16()
    first = skinny_linear(x, weight, config=config)
    assert all(torch.equal(first, skinny_linear(x, weight, config=config)) for _ in range(50))


def capture(call) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("num_rows", [1, 2, 8, 64])
def test_a_chain_in_a_graph_equals_the_products_one_by_one(num_rows: int) -> None:
    """Each product may start while the one before it ends; it reads that one's result, and shares its workspace."""
    size, length = 1024, 12
    x = torch.randn(num_rows, size, device="cuda").bfloat16()
    weights = [(torch.randn(size, size, device="cuda") / size**0.5).bfloat16() for _ in range(length)]
    first = {1: RowConfig(2, 256, splits=2), 2: RowConfig(2, 1024)}.get(num_rows, DotConfig(64, 64, splits=4))
    configs = [first, DotConfig(32, 64)]
    results = [torch.empty_like(x) for _ in range(length)]

    def chain() -> None:
        row = x
        for index, (weight, out) in enumerate(zip(weights, results, strict=True)):
            row = skinny_linear(row, weight, config=configs[index % 2], out=out)

    graph = capture(chain)
    for _ in range(20):
        x.normal_()
        expected, row = [], x
        for index, weight in enumerate(weights):
            row = skinny_linear(row, weight, config=configs[index % 2])
            torch.cuda.synchronize()
            expected.append(row)
        for out in results:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    assert not split_k_workspace(x.device).counters.any()


def test_a_workspace_is_not_made_during_capture() -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="before a graph is captured"), torch.cuda.graph(graph):
        SplitKWorkspace.allocate(torch.device("cuda", 0))
