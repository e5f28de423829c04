"""A shortened decoder runs the kernels that the whole one runs, in fewer layers, and is whole again after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedcore.models import layers
from pagedcore.models.decoder import Decoder
from pagedcore.quant import quantized_linear
from pagedcore.quant.linear import DenseProduct
from pagedcore.quant.packed_product import PackedProduct
from support.dense_attention import DenseAttention
from support.quantized_checkpoints import StoredAs, gptq, is_projection, make_pair
from support.tiny_models import load, make_checkpoint, prompt_ids, run

WINDOW, FULL = "sliding_attention", "full_attention"
SIZES = {"hidden_size": 128, "intermediate_size": 192}


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a forward calls: each layer's attention, each norm with what decides its kernel, each product by its matrix's form."""
    calls: list[tuple[Any, ...]] = []

    def note(owner: Any, name: str, facts: Callable[..., tuple[Any, ...]]) -> None:
        original = getattr(owner, name)

        def noting(*args: Any, **options: Any) -> Any:
            calls.append((name, *facts(*args, **options)))
            return original(*args, **options)

        monkeypatch.setattr(owner, name, noting)

    note(DenseAttention, "attend", lambda self, qkv, rotation, spec: (spec.layer, spec.sliding_window, spec.out_order is None))
    note(layers, "rms_norm", lambda x, *args, **options: (x.shape,))
    note(layers, "add_rms_norm", lambda x, *args, **options: (x.shape,))
    note(layers, "add_rms_norm_in_order", lambda x, residual, *args, **options: (x.shape, residual is None))
    note(PackedProduct, "apply", lambda self, x: (x.shape, self._packed.words.shape, self._packed.bits, self._packed.uniform_zero))
    note(DenseProduct, "apply", lambda self, x: (x.shape, self.num_bytes))
    return calls


def kernels_and_layers(decoder: Decoder, met: list[tuple[Any, ...]]) -> tuple[set[tuple[Any, ...]], list[int]]:
    met.clear()
    run(decoder, prompt_ids(12))
    kernels = {("attend", *call[2:]) if call[0] == "attend" else call for call in met}
    return kernels, [call[1] for call in met if call[0] == "attend"]


def check(decoder: Decoder, met: list[tuple[Any, ...]], short: list[int]) -> None:
    kernels, all_layers = kernels_and_layers(decoder, met)
    with decoder.shortened():
        short_kernels, met_layers = kernels_and_layers(decoder, met)
    assert met_layers == short
    assert short_kernels == kernels
    assert kernels_and_layers(decoder, met) == (kernels, all_layers), "whole again"


@pytest.mark.parametrize(("num_layers", "short"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (6, [0, 1, 5])])
def test_of_layers_alike_three_run(num_layers: int, short: list[int], tmp_path: Path, met: list[tuple[Any, ...]]) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=num_layers)
    check(load(tmp_path), met, short)


def test_layers_with_and_without_a_window_run(tmp_path: Path, met: list[tuple[Any, ...]]) -> None:
    kinds = [FULL, FULL, FULL, WINDOW, WINDOW, FULL]
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=6, layer_types=kinds, sliding_window=8, use_sliding_window=True)
    check(load(tmp_path), met, [0, 1, 3, 5])


def act_order_but_in(*dense: int) -> Callable[[str], bool]:
    return lambda module: is_projection(module) and not any(f".layers.{layer}." in module for layer in dense)


def attention_of_all_but_the_last(module: str) -> bool:
    return is_projection(module) and "self_attn" in module and ".layers.4." not in module


@pytest.mark.parametrize(
    ("packs", "short"),
    [
        (is_projection, [0, 1, 4]),
        (act_order_but_in(0), [0, 1, 4]),
        (act_order_but_in(1), [0, 1, 2, 4]),
        (act_order_but_in(0, 2), [0, 1, 2, 4]),
        (attention_of_all_but_the_last, [0, 1, 4]),
    ],
    ids=["all", "all but the first", "all but the second", "two plain", "attention"],
)
def test_packed_and_plain_layers_run(
    packs: Callable[[str], bool], short: list[int], tmp_path: Path, met: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_linear, "is_packed_on", lambda device, dtype: True)
    pair = make_pair(tmp_path, gptq(group_size=64, act_order=True), num_hidden_layers=5, packs=packs, **SIZES)
    check(load(pair.packed, dtype=torch.float16), met, short)


def test_a_layer_counts_the_order_of_its_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "is_packed_on", lambda device, dtype: True)
    pair = make_pair(tmp_path, gptq(group_size=32, act_order=True), **SIZES)
    for layer in load(pair.packed, dtype=torch.float16)._layers:
        out = layer._out.input_order
        assert out is not None
        norms = (layer._attention_norm, layer._mlp_norm)
        assert layer.num_bytes == sum(linear.num_bytes for linear in layer.linears) + sum(norm.nbytes for norm in norms) + out.nbytes


def zeros_that_differ_in(layer: int) -> StoredAs:
    """Elsewhere all groups have one zero point, with which kernels are compiled."""
    same, differing = gptq(group_size=64), gptq(group_size=64, symmetric=False)

    def write(packed: dict[str, Tensor], module: str, weight: Tensor) -> Tensor:
        return (differing if f".layers.{layer}." in module else same).write(packed, module, weight)

    return replace(differing, write=write)


def test_layers_with_other_zero_points_run(tmp_path: Path, met: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "is_packed_on", lambda device, dtype: True)
    pair = make_pair(tmp_path, zeros_that_differ_in(2), num_hidden_layers=5, **SIZES)
    check(load(pair.packed, dtype=torch.float16), met, [0, 1, 2, 4])


def test_a_failure_leaves_the_decoder_whole(tmp_path: Path, met: list[tuple[Any, ...]]) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=4)
    decoder = load(tmp_path)
    with pytest.raises(ZeroDivisionError), decoder.shortened():
        raise ZeroDivisionError
    assert kernels_and_layers(decoder, met)[1] == [0, 1, 2, 3]
