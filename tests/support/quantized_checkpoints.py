"""Small checkpoints with packed matrices, each beside the dense one that it must equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from support.awq_writer import write_awq
from support.compressed_tensors_writer import write_compressed_tensors
from support.gptq_writer import write_gptq
from support.tiny_models import make_checkpoint

WEIGHTS = "model.safetensors"

Write = Callable[[dict[str, Tensor], str, Tensor], Tensor]
"""Packs a matrix [out, in] under a module's name into the dict, and returns what it stands for."""


@dataclass(frozen=True)
class StoredAs:
    """One way of storing matrices: the writer, and what config.json says of it."""

    write: Write
    settings: dict[str, Any]


@dataclass(frozen=True)
class Pair:
    packed: Path
    dense: Path

    def edit(self, change: Callable[[dict[str, Tensor]], object]) -> None:
        """Change the tensors of the packed one."""
        tensors = load_file(self.packed / WEIGHTS)
        change(tensors)
        save_file(tensors, self.packed / WEIGHTS)

    def configure(self, **changes: Any) -> None:
        """Change the quantization settings of the packed one."""
        path = self.packed / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"] |= changes
        path.write_text(json.dumps(config))


def gptq(*, bits: int = 4, group_size: int = 16, symmetric: bool = True, version: int = 1, act_order: bool = False) -> StoredAs:
    write = partial(write_gptq, bits=bits, group_size=group_size, symmetric=symmetric, version=version, act_order=act_order)
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": act_order,
        "checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version],
        "lm_head": True,
    }
    return StoredAs(write, settings)


def awq(*, group_size: int = 32, version: str = "gemm", zero_point: bool = True) -> StoredAs:
    settings = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": version, "zero_point": zero_point}
    return StoredAs(partial(write_awq, group_size=group_size, version=version, zero_point=zero_point), settings)


def compressed_tensors(
    *, bits: int = 4, group_size: int = 16, symmetric: bool = True, act_order: bool = False, packed_zero_points: bool = True
) -> StoredAs:
    shape = {"bits": bits, "group_size": group_size, "symmetric": symmetric}
    write = partial(write_compressed_tensors, **shape, act_order=act_order, packed_zero_points=packed_zero_points)
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group_size == -1 else "group",
        "group_size": None if group_size == -1 else group_size,
        "actorder": "group" if act_order else None,
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": [],
    }
    return StoredAs(write, settings)


def is_projection(module: str) -> bool:
    """Attention and feed-forward matrices, as quantizers choose by default."""
    return module.endswith("_proj")


def make_pair(root: Path, stored: StoredAs, family: str = "llama", *, packs: Callable[[str], bool] = is_projection, **changes: Any) -> Pair:
    """A random checkpoint of `family` whose modules are packed where `packs` says so, and its dense twin."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
    pair = Pair(root / "packed", root / "dense")
    make_checkpoint(pair.dense, family, **{**shape, **changes})
    packed: dict[str, Tensor] = {}
    dense = load_file(pair.dense / WEIGHTS)
    for name, tensor in list(dense.items()):
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and packs(module):
            dense[name] = stored.write(packed, module, tensor)
        else:
            packed[name] = tensor
    save_file(dense, pair.dense / WEIGHTS)
    pair.packed.mkdir()
    save_file(packed, pair.packed / WEIGHTS)
    config = json.loads((pair.dense / "config.json").read_text())
    (pair.packed / "config.json").write_text(json.dumps({**config, "quantization_config": stored.settings}))
    return pair
