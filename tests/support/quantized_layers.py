"""Quantized layers of every layout that can stay packed, as a checkpoint holds their tensors, with the exact matrix of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcore.quant.awq_layout import AwqGemmLayout, AwqGemvLayout
from pagedcore.quant.checkpoint_format import PackedLayout
from pagedcore.quant.compressed_tensors_layout import PackQuantizedLayout
from pagedcore.quant.gptq_layout import GptqLayout
from pagedcore.quant.gptq_zeros import ZeroStorage
from pagedcore.quant.linear import LinearSpec
from pagedcore.quant.quantized_linear import QuantizedLinear
from support.awq_writer import write_awq
from support.compressed_tensors_writer import write_compressed_tensors
from support.gptq_writer import write_gptq

Writer = Callable[[dict[str, Tensor], str, Tensor], Tensor]


@dataclass(frozen=True)
class Stored:
    """How one module is stored: its layout, and what writes it; the writer returns the matrix that the file means."""

    layout: PackedLayout
    write: Writer
    bits: int = 4


@dataclass(frozen=True)
class Written:
    """A layer that is not loaded yet, its tensors, and the matrix that they mean, float32."""

    layer: QuantizedLinear
    tensors: dict[str, Tensor]
    weight: Tensor
    bias: Tensor | None

    def product(self, x: Tensor) -> Tensor:
        """What the loaded layer makes of x, whose columns stand as in the checkpoint."""
        order = self.layer.input_order
        return self.layer.apply(x if order is None else x.index_select(1, order))


def gptq(
    bits: int = 4, group_size: int | None = 64, *, symmetric: bool = True, version: int = 1, act_order: bool = False, seed: int = 0
) -> Stored:
    layout = GptqLayout(
        bits=bits,
        group_size=group_size,
        has_act_order=act_order,
        is_symmetric=symmetric,
        zero_storage=ZeroStorage.MINUS_ONE if version == 1 else ZeroStorage.AS_IS,
        where="config.json",
    )
    settings = {"bits": bits, "group_size": group_size or -1, "symmetric": symmetric, "version": version, "act_order": act_order}
    return Stored(layout, lambda tensors, name, weight: write_gptq(tensors, name, weight, seed=seed, **settings), bits)


def awq(version: str = "gemm", group_size: int | None = 64, *, zero_point: bool = True) -> Stored:
    layout = (AwqGemmLayout if version == "gemm" else AwqGemvLayout)(group_size, zero_point)
    settings = {"group_size": group_size or -1, "version": version, "zero_point": zero_point}
    return Stored(layout, lambda tensors, name, weight: write_awq(tensors, name, weight, **settings))


def compressed_tensors(bits: int = 4, group_size: int | None = 64, *, symmetric: bool = True, act_order: bool = False) -> Stored:
    layout = PackQuantizedLayout(bits, group_size, symmetric, act_order)
    settings = {"bits": bits, "group_size": group_size or -1, "symmetric": symmetric, "act_order": act_order}
    return Stored(layout, lambda tensors, name, weight: write_compressed_tensors(tensors, name, weight, **settings), bits)


PACKED_LAYOUTS = {
    "gptq 4-bit": gptq(),
    "gptq 4-bit group 128 asymmetric": gptq(4, 128, symmetric=False),
    "gptq 4-bit group 32 v2 asymmetric": gptq(4, 32, symmetric=False, version=2),
    "gptq 4-bit channel": gptq(4, None),
    "gptq 4-bit act-order": gptq(act_order=True),
    "gptq 4-bit act-order asymmetric": gptq(4, 32, symmetric=False, act_order=True),
    "gptq 8-bit": gptq(8),
    "gptq 8-bit asymmetric act-order": gptq(8, 32, symmetric=False, act_order=True),
    "awq gemm": awq(),
    "awq gemm no zero points": awq(zero_point=False),
    "awq gemv": awq("gemv", 32),
    "awq channel": awq(group_size=None),
    "compressed-tensors 4-bit": compressed_tensors(),
    "compressed-tensors 4-bit act-order": compressed_tensors(4, 32, symmetric=False, act_order=True),
    "compressed-tensors 8-bit channel": compressed_tensors(8, None, symmetric=False),
}


def write_layer(
    parts: list[Stored | None],
    in_features: int,
    out_features: tuple[int, ...],
    dtype: torch.dtype,
    *,
    has_bias: bool = False,
    device: str = "cpu",
) -> Written:
    """One part for each of `out_features`; None is a plain matrix. The tensors are as a source would hand them over."""
    generator = torch.Generator().manual_seed(0)
    names = tuple(f"m.{index}" for index in range(len(parts)))
    stored: dict[str, Tensor] = {}
    weights, biases = [], []
    for name, part, rows in zip(names, parts, out_features, strict=True):
        drawn = torch.randn(rows, in_features, generator=generator) * 0.1
        if part is None:
            stored[f"{name}.weight"] = drawn.to(dtype)
            weights.append(stored[f"{name}.weight"].float())
        else:
            weights.append(part.write(stored, name, drawn))
        if has_bias:
            stored[f"{name}.bias"] = torch.randn(rows, generator=generator).to(dtype)
            biases.append(stored[f"{name}.bias"])
    spec = LinearSpec(names=names, in_features=in_features, out_features=out_features, has_bias=has_bias)
    layer = QuantizedLinear(spec, [None if part is None else part.layout for part in parts], dtype=dtype, present=frozenset(stored))
    wanted = {name: stored[name].to(device, declared.dtype or dtype) for name, declared in layer.declare().items()}
    bias = torch.cat(biases).to(device) if biases else None
    return Written(layer, wanted, torch.cat(weights).to(device), bias)
