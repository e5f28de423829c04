"""The seam of linear layers: what is declared is what is taken, and packing changes speed alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedcore.quant import LinearSpec, UnquantizedLinear, cpu, linear

SPEC = LinearSpec(names=("a.q", "a.k"), in_features=24, out_features=(10, 6), has_bias=True)


def draw(layer: UnquantizedLinear, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(spec.shape, generator=generator).to(dtype) for name, spec in layer.declare().items()}


def test_each_part_is_declared_in_checkpoint_order() -> None:
    assert [(name, spec.shape) for name, spec in UnquantizedLinear(SPEC).declare().items()] == [
        ("a.q.weight", (10, 24)),
        ("a.q.bias", (10,)),
        ("a.k.weight", (6, 24)),
        ("a.k.bias", (6,)),
    ]


def test_parts_are_stacked_by_output() -> None:
    layer = UnquantizedLinear(SPEC)
    tensors = draw(layer)
    layer.repack(tensors)
    x = torch.randn(5, 24)
    parts = [x @ tensors[f"a.{part}.weight"].T + tensors[f"a.{part}.bias"] for part in "qk"]
    torch.testing.assert_close(layer.apply(x), torch.cat(parts, dim=-1))


def test_outputs_of_plain_matrices_come_in_the_order_asked_for() -> None:
    layer, as_they_stand = UnquantizedLinear(SPEC), UnquantizedLinear(SPEC)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1)).int()
    layer.repack(draw(layer), output_order=order)
    as_they_stand.repack(draw(layer))
    x = torch.randn(5, 24)
    torch.testing.assert_close(layer.apply(x), as_they_stand.apply(x)[:, order.long()])


@pytest.mark.skipif(not cpu._has_packed_linear(), reason="this torch has no packed products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5, 16, 129])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_product_equals_the_plain_one(dtype: torch.dtype, rows: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LinearSpec(names=("a.o",), in_features=123, out_features=(77,), has_bias=has_bias)
    results = []
    x = torch.randn(rows, 2 * 123, generator=torch.Generator().manual_seed(1)).to(dtype)[:, :123]
    for pays in (False, True):
        monkeypatch.setattr(linear, "packing_pays", lambda weight, pays=pays: pays)
        layer = UnquantizedLinear(spec)
        layer.repack(draw(layer, dtype))
        results.append(layer.apply(x))
    assert results[1].shape == (rows, 77)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.25}[dtype]
    torch.testing.assert_close(results[1], results[0], atol=tolerance, rtol=0.0)


@pytest.mark.parametrize(
    ("dtype", "out_features", "has_units", "machine", "expected"),
    [
        (torch.bfloat16, 64, True, "x86_64", True),
        (torch.bfloat16, 4096, False, "x86_64", False),
        (torch.float32, 4096, False, "x86_64", True),
        (torch.float32, 4096, True, "AMD64", True),
        (torch.float32, 576, True, "x86_64", False),
        (torch.float16, 4096, True, "x86_64", False),
        (torch.float32, 4096, False, "arm64", False),
    ],
)
def test_packing_is_used_where_it_was_measured_to_pay(
    dtype: torch.dtype, out_features: int, has_units: bool, machine: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "cpu_has_bf16_units", lambda: has_units)
    monkeypatch.setattr(cpu, "_has_packed_linear", lambda: True)
    monkeypatch.setattr(cpu.platform, "machine", lambda: machine)
    assert cpu.packing_pays(torch.empty(out_features, 8, dtype=dtype)) is expected


def test_weights_on_another_device_are_never_packed() -> None:
    assert not cpu.packing_pays(torch.empty(4096, 8, device="meta"))


def test_a_torch_without_packed_products_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not cpu.packing_pays(torch.empty(4096, 8))


@pytest.mark.parametrize("pays", [False, True])
def test_a_single_weight_is_kept_as_it_is_unless_it_is_packed(pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "packing_pays", lambda weight: pays)
    monkeypatch.setattr(linear, "pack", lambda weight: weight.clone())
    layer, weight = UnquantizedLinear(LinearSpec(names=("a",), in_features=3, out_features=(4,))), torch.ones(4, 3)
    layer.repack({"a.weight": weight})
    assert layer.holds(weight) is not pays
