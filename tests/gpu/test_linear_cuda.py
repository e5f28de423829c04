# ruff: noqa: E402
"""Skinny products on a GPU, plain and 4 bit: every path against plain torch, in graphs, and one after another."""

from __future__ import annotations

import pytest
import torch

from support.linear_problems import assert_product, poisoned, random_packed, random_rows

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from pagedcore_kernels.packed_w4 import pack_w4
from pagedcore_kernels.reference import linear as reference
from pagedcore_kernels.reference import w4a16_linear as reference_w4
from pagedcore_kernels.triton_ops import linear_settings
from pagedcore_kernels.triton_ops.dequantize_w4 import dequantize_w4
from pagedcore_kernels.triton_ops.linear_settings import DotConfig, RowConfig
from pagedcore_kernels.triton_ops.row_linear import norm_row_linear, row_linear, silu_mul_row_linear
from pagedcore_kernels.triton_ops.skinny_linear import skinny_linear
from pagedcore_kernels.triton_ops.split_k import SplitKWorkspace, split_k_workspace
from pagedcore_kernels.triton_ops.w4_settings import W4Config
from pagedcore_kernels.triton_ops.w4a16_linear import w4a16_linear

TYPES = [torch.float32, torch.float16, torch.bfloat16]
HALF_TYPES = TYPES[1:]
ROW_CONFIGS = [RowConfig(4, 1024), RowConfig(8, 512), RowConfig(4, 256, splits=3), RowConfig(2, 4096, 8)]
DOT_CONFIGS = [DotConfig(64, 64), DotConfig(32, 64, splits=4), DotConfig(64, 32, 4, 2, 8, 0)]
W4_CONFIGS = [W4Config(64, 2), W4Config(128, 4, splits=3), W4Config(64, 4, 2, 8, prefetched_blocks=0)]


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
@pytest.mark.parametrize("num_rows", [1, 17, 64])
@pytest.mark.parametrize(("out_features", "in_features"), [(100, 301), (1000, 2056)])
def test_any_shape_with_the_configuration_that_is_chosen(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> None:
    check_skinny(num_rows, out_features, in_features, dtype)


@pytest.mark.parametrize("config", ROW_CONFIGS)
@pytest.mark.parametrize(("out_features", "in_features"), [(256, 4096), (101, 1000)])
def test_configurations_for_one_row(out_features: int, in_features: int, config: RowConfig) -> None:
    check_skinny(1, out_features, in_features, torch.bfloat16, config)


@pytest.mark.parametrize("config", DOT_CONFIGS)
@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize(("out_features", "in_features"), [(256, 4096), (101, 1000)])
def test_configurations_for_several_rows(num_rows: int, out_features: int, in_features: int, config: DotConfig) -> None:
    check_skinny(num_rows, out_features, in_features, torch.bfloat16, config)


@pytest.mark.parametrize("shape", [shape for shape in linear_settings._SM90 if shape[1] < 100_000])
def test_shapes_of_the_table(shape: tuple[int, int]) -> None:
    for num_rows in (1, 8, 32, 64):
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


def check_neighbours(in_features: int, out_features: int, dtype: torch.dtype, config: RowConfig | None) -> None:
    """The three products of one row that take over the ops before and after them."""
    x, gate_up = random_rows(1, in_features, dtype, "cuda"), random_rows(1, 2 * in_features, dtype, "cuda")
    weight, bias = random_rows(out_features, in_features, dtype, "cuda"), torch.randn(out_features, device="cuda").to(dtype)
    norm_weight = torch.randn(in_features, device="cuda").to(dtype)
    calls = {"norm": (x, norm_weight, weight, bias), "silu": (gate_up, weight, bias), "plain": (x, weight, bias)}
    residual = torch.randn(1, out_features, device="cuda").to(dtype)
    out = poisoned(1, out_features, dtype=dtype, device="cuda")
    norm_row_linear(*calls["norm"], eps=1e-6, config=config, out=out)
    assert_product(out, reference.norm_row_linear(*calls["norm"], eps=1e-6))
    for name, op, expected in (
        ("silu", silu_mul_row_linear, reference.silu_mul_row_linear),
        ("plain", row_linear, reference.row_linear),
    ):
        in_place = residual.clone()
        op(*calls[name], residual=in_place, config=config, out=in_place)
        assert_product(in_place, expected(*calls[name], residual=residual))


@pytest.mark.parametrize(("shape", "dtype"), [((3072, 1024), torch.bfloat16), ((301, 77), torch.float16), ((1024, 4096), torch.float32)])
def test_products_of_one_row_with_their_neighbours(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_neighbours(*shape, dtype, None)


@pytest.mark.parametrize("config", [RowConfig(4, 256, splits=3), RowConfig(8, 512)])
def test_products_of_one_row_with_their_neighbours_in_parts(config: RowConfig) -> None:
    check_neighbours(4096, 300, torch.bfloat16, config)


def capture(call) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("bits", [4, 16])
def test_a_chain_in_a_graph_equals_the_products_one_by_one(num_rows: int, bits: int) -> None:
    """Each product may start while the one before it ends; it reads that one's result, and shares its workspace."""
    size, length = 1024, 12
    x = torch.randn(num_rows, size, device="cuda").bfloat16()
    if bits == 4:
        weights = [random_packed(size, size, 128, uniform=False, device="cuda") for _ in range(length)]
        configs = [W4Config(64, 2, splits=4), W4Config(64, 4)]
    else:
        weights = [(torch.randn(size, size, device="cuda") / size**0.5).bfloat16() for _ in range(length)]
        configs = [RowConfig(2, 256, splits=2) if num_rows == 1 else DotConfig(64, 64, splits=4), DotConfig(32, 64)]
    multiply = w4a16_linear if bits == 4 else skinny_linear
    results = [torch.empty_like(x) for _ in range(length)]

    def chain() -> None:
        row = x
        for index, (weight, out) in enumerate(zip(weights, results, strict=True)):
            row = multiply(row, weight, config=configs[index % 2], out=out)

    graph = capture(chain)
    for _ in range(20):
        x.normal_()
        expected, row = [], x
        for index, weight in enumerate(weights):
            row = multiply(row, weight, config=configs[index % 2])
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


# --- 4 bit ------------------------------------------------------------------------------------------------------------


def check_w4(num_rows: int, shape: tuple[int, int, int], dtype: torch.dtype, *, uniform: bool, config: W4Config | None = None) -> None:
    packed = random_packed(*shape, uniform=uniform, device="cuda")
    x = random_rows(num_rows, shape[1], dtype, "cuda")
    bias = torch.randn(shape[0], device="cuda").to(dtype)
    workspace = poisoned_workspace() if config else split_k_workspace(x.device)
    out = poisoned(num_rows, shape[0], dtype=dtype, device="cuda")
    w4a16_linear(x, packed, bias, config=config, workspace=workspace, out=out)
    assert_product(out, x.double() @ reference_w4.dequantize_w4(packed, torch.float32).double().t() + bias.double())
    assert not workspace.counters.any()


@pytest.mark.parametrize(("dtype", "uniform"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize("num_rows", [1, 5, 8, 9, 16, 17, 32, 33, 64])
def test_4_bit_rows(num_rows: int, uniform: bool, dtype: torch.dtype) -> None:
    check_w4(num_rows, (1000, 1024, 128), dtype, uniform=uniform)


W4_SHAPES = [(200, 1024, 32), (200, 1024, 64), (200, 768, 96), (200, 1024, 256), (200, 1024, -1), (77, 301, -1), (65, 160, 32)]


@pytest.mark.parametrize("shape", W4_SHAPES)
def test_4_bit_groups(shape: tuple[int, int, int]) -> None:
    for num_rows in (1, 20):
        check_w4(num_rows, shape, torch.bfloat16, uniform=False)


@pytest.mark.parametrize("config", W4_CONFIGS)
@pytest.mark.parametrize("num_rows", [1, 20])
def test_4_bit_configurations(num_rows: int, config: W4Config) -> None:
    check_w4(num_rows, (300, 2048, 128), torch.bfloat16, uniform=False, config=config)


@pytest.mark.parametrize("shape", [(4096, 4096, 128), (4096, 11008, 128), (22016, 4096, 128)])
def test_4_bit_shapes_of_a_7b_model(shape: tuple[int, int, int]) -> None:
    for num_rows in (1, 16, 64):
        check_w4(num_rows, shape, torch.bfloat16, uniform=True)


@pytest.mark.parametrize("num_rows", [65, 128, 300])
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_4_bit_many_rows(num_rows: int, dtype: torch.dtype) -> None:
    check_w4(num_rows, (300, 1024, 128), dtype, uniform=False)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("num_rows", [1, 32])
def test_4_bit_products_of_small_integers_are_exact(num_rows: int, dtype: torch.dtype) -> None:
    """Codes pass the tensor cores as subnormal numbers or beside a large offset: nothing of them may be lost."""
    codes = torch.randint(0, 16, (128, 1024), dtype=torch.uint8, device="cuda")
    zeros = torch.randint(0, 17, (128, 8), dtype=torch.uint8, device="cuda")
    packed = pack_w4(codes, torch.ones(128, 8, device="cuda"), zeros)
    x = torch.zeros(num_rows, 1024, dtype=dtype, device="cuda")
    for row in x:
        row[torch.randperm(1024, device="cuda")[:8]] = torch.randint(-1, 2, (8,), device="cuda").to(dtype)
    expected = x.double() @ (codes.double() - zeros.double().repeat_interleave(128, 1)).t()
    assert torch.equal(w4a16_linear(x, packed).double(), expected)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e3])
def test_4_bit_rows_of_any_magnitude(magnitude: float, dtype: torch.dtype) -> None:
    packed = random_packed(256, 1024, 128, uniform=False, device="cuda")
    x = (torch.randn(4, 1024, device="cuda") * magnitude).to(dtype)
    assert_product(w4a16_linear(x, packed), x.double() @ reference_w4.dequantize_w4(packed, torch.float32).double().t())


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("shape", [(300, 1024, 128), (77, 301, -1), (65, 160, 32)])
@pytest.mark.parametrize("uniform", [False, True])
def test_4_bit_weights_expand_to_the_very_bits_of_the_reference(shape: tuple[int, int, int], dtype: torch.dtype, uniform: bool) -> None:
    packed = random_packed(*shape, uniform=uniform, device="cuda")
    out = poisoned(*shape[:2], dtype=dtype, device="cuda")
    dequantize_w4(packed, dtype, out=out)
    assert torch.equal(out, reference_w4.dequantize_w4(packed, dtype))
