"""torch's 4-bit product equals the dense one, is used where it was measured to pay, and for few rows alone."""

from __future__ import annotations

import pytest
import torch

from pagedcore.quant import LinearSpec, cpu, cpu_int4, quantized_linear
from pagedcore.quant.checkpoint_format import PackedLayout
from pagedcore.quant.cpu_int4 import Int4Product, has_fast_int4, int4_pays
from pagedcore.quant.quantized_linear import QuantizedLinear
from pagedcore.quant.quantized_matrix import QuantizedMatrix
from pagedcore.quant.tensor_spec import TensorSpec

needs_operator = pytest.mark.skipif(not cpu_int4._has_operator(), reason="this torch has no 4-bit product")


def matrix(*, out_features: int = 32, group_size: int = 32, bits: int = 4, act_order: bool = False) -> QuantizedMatrix:
    in_features = 128
    generator = torch.Generator().manual_seed(out_features)
    num_groups = in_features // group_size
    groups = torch.arange(in_features) // group_size
    return QuantizedMatrix(
        codes=torch.randint(0, 1 << bits, (out_features, in_features), generator=generator, dtype=torch.uint8),
        scales=torch.rand(out_features, num_groups, generator=generator) * 0.02 + 0.001,
        zeros=torch.randint(0, 1 << bits, (out_features, num_groups), generator=generator, dtype=torch.uint8),
        bits=bits,
        group_of_input=groups[torch.randperm(in_features, generator=generator)] if act_order else None,
    )


@pytest.fixture
def _pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_int4, "has_fast_int4", lambda: True)


@needs_operator
@pytest.mark.usefixtures("_pays")
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_equals_the_dense_one(rows: int, group_size: int, act_order: bool, has_bias: bool) -> None:
    stored = matrix(group_size=group_size, act_order=act_order)
    bias = torch.randn(32, generator=torch.Generator().manual_seed(1)).bfloat16() if has_bias else None
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)).bfloat16()
    expected = x.float() @ stored.dequantize(torch.float32).T + (0.0 if bias is None else bias.float())
    result = Int4Product(stored, bias).apply(x)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), expected, atol=0.05, rtol=0.02)


@pytest.mark.usefixtures("_pays")
@pytest.mark.parametrize(
    ("stored", "dtype", "expected"),
    [
        (matrix(), torch.bfloat16, True),
        (matrix(), torch.float32, False),
        (matrix(), torch.float16, False),
        (matrix(act_order=True), torch.bfloat16, True),
        (matrix(out_features=24), torch.bfloat16, False),
        (matrix(group_size=16), torch.bfloat16, False),
        (matrix(bits=8), torch.bfloat16, False),
    ],
)
def test_only_layouts_that_the_operator_takes_use_it(stored: QuantizedMatrix, dtype: torch.dtype, expected: bool) -> None:
    assert int4_pays(stored, dtype) is (expected and cpu_int4._has_operator())


@pytest.mark.usefixtures("_pays")
def test_groups_of_different_sizes_do_not_use_it() -> None:
    stored = matrix(act_order=True)
    assert stored.group_of_input is not None
    stored.group_of_input[stored.group_of_input == 0] = 1
    assert not int4_pays(stored, torch.bfloat16)


@pytest.mark.parametrize(
    ("machine", "has_units", "has_operator", "expected"),
    [("x86_64", True, True, True), ("arm64", True, True, False), ("x86_64", False, True, False), ("AMD64", True, False, False)],
)
def test_it_is_fast_where_it_was_measured(
    machine: str, has_units: bool, has_operator: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu.platform, "machine", lambda: machine)
    monkeypatch.setattr(cpu_int4, "cpu_has_bf16_units", lambda: has_units)
    monkeypatch.setattr(cpu_int4, "_has_operator", lambda: has_operator)
    assert has_fast_int4() is expected


class FixedLayout:
    """A layout whose matrix is at hand."""

    def __init__(self, stored: QuantizedMatrix) -> None:
        self._stored = stored

    def declare(self, name: str, in_features: int, out_features: int, present: object) -> dict[str, TensorSpec]:
        return {}

    def unpack(self, name: str, in_features: int, out_features: int, tensors: object) -> QuantizedMatrix:
        return self._stored


def layer(*parts: QuantizedMatrix) -> QuantizedLinear:
    layouts: list[PackedLayout] = [FixedLayout(part) for part in parts]
    names = tuple(f"part{index}" for index in range(len(parts)))
    spec = LinearSpec(names=names, in_features=128, out_features=tuple(part.out_features for part in parts))
    linear = QuantizedLinear(spec, layouts, dtype=torch.bfloat16, present=())
    linear.repack({})
    return linear


@needs_operator
@pytest.mark.usefixtures("_pays")
def test_a_layer_uses_it_for_few_rows_and_a_dense_copy_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [matrix(), matrix(out_features=16)]
    linear = layer(*parts)
    assert linear.backend == "torch-int4"
    dense = torch.cat([part.dequantize(torch.bfloat16) for part in parts])
    assert linear.num_bytes == dense.nbytes + 48 * 128 // 2 + 4 * 48 * 2 * 2
    ordered = layer(matrix(act_order=True))
    assert ordered.num_bytes == dense.nbytes // 3 * 2 + 32 * 128 // 2 + 4 * 32 * 2 * 2 + 128 * 8  # and the order of inputs
    rows: list[int] = []
    apply = Int4Product.apply
    monkeypatch.setattr(Int4Product, "apply", lambda self, x: rows.append(len(x)) or apply(self, x))
    for count in (1, 3, 4):
        x = torch.randn(count, 128).bfloat16()
        torch.testing.assert_close(linear.apply(x).float(), x.float() @ dense.float().T, atol=0.05, rtol=0.02)
    assert rows == [1, 3]


@pytest.mark.usefixtures("_pays")
@pytest.mark.parametrize("other", [matrix(group_size=64), matrix(bits=8), matrix(act_order=True)])
def test_parts_that_one_matrix_cannot_say_are_multiplied_dense(other: QuantizedMatrix) -> None:
    linear = layer(matrix(), other)
    assert linear.backend == quantized_linear.DEQUANTIZED
    x = torch.randn(2, 128).bfloat16()
    expected = torch.cat([x.float() @ part.dequantize(torch.bfloat16).float().T for part in (matrix(), other)], dim=-1)
    torch.testing.assert_close(linear.apply(x).float(), expected, atol=0.05, rtol=0.02)
