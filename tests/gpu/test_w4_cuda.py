# ruff: noqa: E402
"""Weights that stay packed, on a GPU: every kernel and layout against plain torch, with NaN wherever a kernel should write."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from support.linear_problems import assert_product, poisoned, random_packed, random_rows
from support.quantized_layers import PACKED_LAYOUTS, Written, gptq, write_layer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_ahead")]
pytest.importorskip("triton")

from pagedcore_kernels.packed_weights import PackedWeights, pack_weights
from pagedcore_kernels.reference import packed_linear as reference
from pagedcore_kernels.triton_ops.dequantize import dequantize
from pagedcore_kernels.triton_ops.packed_linear import packed_linear
from pagedcore_kernels.triton_ops.packed_settings import LARGE_TILES, ROW_BUCKETS, FewRowsConfig, ManyRowsConfig, PackedConfig
from pagedcore_kernels.triton_ops.split_k import SplitKWorkspace, split_k_workspace
from pagedcore_kernels.triton_ops.take_columns import take_columns

FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
SHAPE = (1000, 1024, 128)


@pytest.fixture(scope="module")
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    """Compiles what the collected cases launch, in threads: Triton's passes and the assembler run outside of Python's lock.

    What fails here fails again in the case's own test.
    """
    split_k_workspace(torch.device("cuda", torch.cuda.current_device()))
    collected = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    cases = list(dict.fromkeys(case for case in collected if isinstance(case, (Problem, Chain, LayerCase))))
    random.Random(0).shuffle(cases)  # neighbours launch the same kernel: each would compile it
    with ThreadPoolExecutor(16) as pool:
        for case in cases:
            pool.submit(case.launch)
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def full_precision_matmul() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)


@dataclass(frozen=True)
class Problem:
    """A product with a bias."""

    num_rows: int
    shape: tuple[int, int, int] = SHAPE
    dtype: torch.dtype = BFLOAT16
    bits: int = 4
    uniform: bool = False
    config: PackedConfig | None = None

    def weights(self) -> PackedWeights:
        return random_packed(*self.shape, uniform=self.uniform, bits=self.bits, device="cuda")

    def rows(self, magnitude: float = 1.0) -> Tensor:
        return random_rows(self.num_rows, self.shape[1], self.dtype, "cuda").mul_(magnitude)

    def bias(self) -> Tensor:
        return torch.randn(self.shape[0], device="cuda").to(self.dtype)

    def multiply(self, x: Tensor, packed: PackedWeights, bias: Tensor) -> Tensor:
        """With a poisoned result, and with a poisoned workspace where the configuration is given; the workspace is left clean."""
        space = poisoned_workspace() if self.config else split_k_workspace(x.device)
        out = poisoned(self.num_rows, self.shape[0], dtype=self.dtype, device="cuda")
        packed_linear(x, packed, bias, config=self.config, workspace=space, out=out)
        assert not space.counters.any()
        return out

    def launch(self) -> None:
        self.multiply(self.rows(), self.weights(), self.bias())

    def check(self, magnitude: float = 1.0) -> None:
        x, packed, bias = self.rows(magnitude), self.weights(), self.bias()
        expected = x.double() @ reference.dequantize(packed, torch.float32).double().t() + bias.double()
        assert_product(self.multiply(x, packed, bias), expected)


def poisoned_workspace() -> SplitKWorkspace:
    return SplitKWorkspace(poisoned(1 << 20, dtype=torch.float32, device="cuda"), torch.zeros(4096, dtype=torch.int32, device="cuda"))


# --- products ---------------------------------------------------------------------------------------------------------

NUMBERS_OF_ROWS = [1, 5, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 256, 257, 1000, 4096]
BY_ROWS = [Problem(rows, dtype=dtype, bits=bits) for rows, dtype, bits in product(NUMBERS_OF_ROWS, (FLOAT16, BFLOAT16), (4, 8))]
GROUPS = [(200, 1024, 32), (200, 1024, 64), (200, 768, 96), (200, 1024, 256), (200, 1024, -1)]
ODD_SHAPES = [(77, 301, -1), (65, 160, 32)]
BY_SHAPE = [
    Problem(rows, shape, bits=bits, uniform=bits == 8)
    for shapes, numbers_of_rows in ((GROUPS, (1, 20, 300)), (ODD_SHAPES, (1, 12, 20, 70, 300)))
    for shape, rows, bits in product(shapes, numbers_of_rows, (4, 8))
]
FEW_CONFIGS = [
    FewRowsConfig(64, 2),
    FewRowsConfig(128, 4, splits=3),
    FewRowsConfig(64, 4, 2, 8, prefetched_blocks=0),
    FewRowsConfig(64, 4, block_m=16),
    FewRowsConfig(128, 8, 3, 4, block_m=16),
]
MANY_CONFIGS = [
    ManyRowsConfig(16, 64, 64, 4),
    ManyRowsConfig(32, 128, 64, splits=3),
    ManyRowsConfig(64, 128, 32, 4, 2),
    ManyRowsConfig(128, 128, 32, 8, 2, prefetched_blocks=0),
    ManyRowsConfig(128, 256, 32, 8, 2),
]
OPERANDS = [(BFLOAT16, 4), (FLOAT16, 8)]
BY_CONFIG = [
    Problem(rows, (512, 2048, 128), dtype, bits, config=config)
    for configs, numbers_of_rows in ((FEW_CONFIGS, (1, 16)), (MANY_CONFIGS, (1, 40, 160)))
    for config, rows, (dtype, bits) in product(configs, numbers_of_rows, OPERANDS)
]
BY_TILE = [
    Problem(most_rows, (1024, 2048, 128), dtype, bits, uniform, replace(tile.config, splits=3))
    for bits, buckets in LARGE_TILES.items()
    for most_rows, tiles in zip(ROW_BUCKETS, buckets, strict=False)
    for tile, (dtype, uniform) in product(tiles, ((FLOAT16, True), (BFLOAT16, False)))
    if tile.dtype in (None, dtype)
]
OF_7B = [(4096, 4096, 128), (4096, 11008, 128), (22016, 4096, 128), (12288, 4096, 128)]
BY_7B_SHAPE = [Problem(rows, shape, FLOAT16, uniform=True) for shape, rows in product(OF_7B, (1, 16, 32, 64, 128, 160, 256))]


@pytest.mark.parametrize("case", [*BY_ROWS, *BY_SHAPE, *BY_CONFIG, *BY_TILE, *BY_7B_SHAPE], ids=str)
def test_products_equal_those_with_the_dequantized_weights(case: Problem) -> None:
    case.check()


@pytest.mark.parametrize("magnitude", [1e-3, 1e3])
@pytest.mark.parametrize("case", [Problem(rows, dtype=dtype) for rows, dtype in product((5, 33), (FLOAT16, BFLOAT16))], ids=str)
def test_rows_of_any_magnitude(case: Problem, magnitude: float) -> None:
    case.check(magnitude)


@pytest.mark.parametrize("case", [Problem(rows, dtype=dtype) for rows, dtype in product((1, 16, 32, 128), (FLOAT16, BFLOAT16))], ids=str)
def test_products_of_small_integers_are_exact(case: Problem) -> None:
    """Codes pass the tensor cores as subnormal numbers or beside a large offset: nothing of them may be lost, whatever the zero point."""
    out_features, in_features, _ = SHAPE
    codes = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8, device="cuda")
    zeros = (torch.arange(out_features * 8, device="cuda") % 17).to(torch.uint8).view(out_features, 8)  # 16: a stored 15 plus one
    packed = pack_weights(codes, torch.ones(out_features, 8, device="cuda"), zeros)
    x = torch.zeros(case.num_rows, in_features, dtype=case.dtype, device="cuda")
    for row in x:
        row[torch.randperm(in_features, device="cuda")[:8]] = torch.randint(-1, 2, (8,), device="cuda").to(case.dtype)
    bias = torch.zeros(out_features, dtype=case.dtype, device="cuda")
    expected = x.double() @ (codes.double() - zeros.double().repeat_interleave(128, 1)).t()
    assert torch.equal(case.multiply(x, packed, bias).double(), expected)


# --- products one after another ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """Twelve square products, each of the one before it, with two configurations in turn."""

    num_rows: int
    configs: tuple[PackedConfig | None, PackedConfig | None]

    def weights(self) -> list[PackedWeights]:
        return [random_packed(1024, 1024, 128, uniform=False, device="cuda") for _ in range(12)]

    def products(self, x: Tensor, weights: list[PackedWeights], results: list[Tensor] | None = None) -> Iterator[Tensor]:
        for index, weight in enumerate(weights):
            x = packed_linear(x, weight, config=self.configs[index % 2], out=None if results is None else results[index])
            yield x

    def launch(self) -> None:
        x = torch.zeros(self.num_rows, 1024, dtype=BFLOAT16, device="cuda")
        list(self.products(x, self.weights()[:2]))


FEW_IN_TURN = (FewRowsConfig(64, 2, splits=4), FewRowsConfig(64, 4))
MANY_IN_TURN = (ManyRowsConfig(64, 64, 32, 4, splits=4), ManyRowsConfig(128, 128, 32))


@pytest.mark.parametrize(
    "case", [Chain(1, FEW_IN_TURN), Chain(8, FEW_IN_TURN), Chain(100, MANY_IN_TURN), Chain(300, (None, None))], ids=str
)
def test_a_chain_in_a_graph_equals_the_products_one_by_one(case: Chain) -> None:
    """Each product may start while the one before it ends; it reads that one's result, and shares its workspace."""
    x, weights = torch.randn(case.num_rows, 1024, device="cuda").bfloat16(), case.weights()
    results = [torch.empty_like(x) for _ in weights]
    list(case.products(x, weights, results))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        list(case.products(x, weights, results))
    for _ in range(20):
        x.normal_(std=0.1)
        expected = []
        for product_ in case.products(x, weights):
            torch.cuda.synchronize()
            expected.append(product_)
        for out in results:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    assert not split_k_workspace(x.device).counters.any()


# --- what else is launched --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize("shape", [SHAPE, *ODD_SHAPES])
@pytest.mark.parametrize("uniform", [False, True])
def test_weights_expand_to_the_very_bits_of_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, uniform: bool, bits: int
) -> None:
    packed = random_packed(*shape, uniform=uniform, bits=bits, device="cuda")
    out = poisoned(*shape[:2], dtype=dtype, device="cuda")
    dequantize(packed, dtype, out=out)
    assert torch.equal(out, reference.dequantize(packed, dtype))


@pytest.mark.parametrize("width", [33, 4096, 11008])
@pytest.mark.parametrize("num_rows", [1, 300])
def test_columns_are_taken_in_the_order_asked_for(num_rows: int, width: int) -> None:
    x, order = random_rows(num_rows, width, BFLOAT16, "cuda"), torch.randperm(width, device="cuda").int()
    out = poisoned(num_rows, width, dtype=BFLOAT16, device="cuda")
    assert torch.equal(take_columns(x, order, out=out), x[:, order.long()])


# --- layers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerCase:
    """Two modules of one layout that share a product."""

    layout: str
    dtype: torch.dtype

    @property
    def numbers_of_rows(self) -> tuple[int, ...]:
        return (7, 33, 4096) if self.dtype == FLOAT16 else (16, 257)

    def load(self) -> Written:
        stored = PACKED_LAYOUTS[self.layout]
        written = write_layer([stored, stored], 256, (40, 56), self.dtype, has_bias=True, device="cuda")
        written.layer.repack(written.tensors)
        assert written.layer.backend == f"triton-w{stored.bits}a16"
        return written

    def rows(self) -> Iterator[Tensor]:
        return (random_rows(num_rows, 256, self.dtype, "cuda") for num_rows in self.numbers_of_rows)

    def launch(self) -> None:
        layer = self.load().layer
        for x in self.rows():
            layer.apply(x)


@pytest.mark.parametrize("case", [LayerCase(*pair) for pair in product(PACKED_LAYOUTS, (FLOAT16, BFLOAT16))], ids=str)
def test_every_layout_stays_packed_and_means_what_the_file_says(case: LayerCase) -> None:
    written = case.load()
    assert written.bias is not None
    for x in case.rows():
        assert_product(written.product(x), x.double() @ written.weight.double().t() + written.bias.double())


def test_what_the_kernels_do_not_read_is_dequantized_on_a_gpu_too() -> None:
    for parts in ([gptq(2)], [gptq(4, 16)], [gptq(), None]):
        written = write_layer(parts, 256, (40, 56)[: len(parts)], FLOAT16, device="cuda")
        written.layer.repack(written.tensors)
        assert written.layer.backend == "dequantized"
        x = random_rows(5, 256, FLOAT16, "cuda")
        assert_product(written.product(x), x.double() @ written.weight.double().t())
