"""`pagedcore bench kernels` and `products`: what the kernels of a model's shape reach of the card's own speed, and of 16 bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pagedcore.commands.bench.facts import default_label, device_name, model_name, model_shape, software_facts
from pagedcore.commands.bench.results import Fact, Results
from pagedcore.commands.progress_bars import progress_bars
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError

if TYPE_CHECKING:
    from pagedcore.commands.bench.roofline.case import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductsWork:
    """What is asked: each matrix of a layer, packed so, at each number of rows."""

    bits: int
    group_size: int
    has_zeros: bool
    rows: Sequence[int]
    rounds: int


def run_kernels(config: EngineConfig, num_rounds: int, label: str | None) -> Results:
    """Raises `ConfigError` on a machine without a CUDA device or without Triton, and what finding the model raises."""
    check_gpu("kernels")
    from pagedcore.commands.bench.roofline.measure import measure_kernels

    shape, facts = _shape_and_facts(config)
    with progress_bars() as progress:
        roofs, points = measure_kernels(shape, num_rounds, progress)
    asked: dict[str, Fact] = {
        "read_tb_per_s": round(roofs.read_bytes_per_s / 1e12, 3),
        "copy_tb_per_s": round(roofs.copy_bytes_per_s / 1e12, 3),
        "matmul_tflop_per_s": round(roofs.matmul_flops_per_s / 1e12, 1),
        "rounds": num_rounds,
    }
    return Results(command="kernels", label=label or default_label(), facts=facts, work=asked, points=points)


def run_products(config: EngineConfig, work: ProductsWork, label: str | None) -> Results:
    """Raises as `run_kernels`, and `ConfigError` for 32-bit activations or groups that packed weights cannot have."""
    check_gpu("products")
    from pagedcore.commands.bench.roofline.packed import PackedForm, measure_packed
    from pagedcore_kernels.packed_weights import holds_groups_of

    if not holds_groups_of(work.group_size):
        raise ConfigError(f"--group-size is {work.group_size} and must be a multiple of 32: other groups are not multiplied packed.")
    shape, facts = _shape_and_facts(config)
    if shape.itemsize != 2:
        raise ConfigError(f"Packed weights are multiplied with 16-bit activations; with {facts['dtype']} take --dtype float16 or bfloat16.")
    form = PackedForm(work.bits, work.group_size, work.has_zeros)
    with progress_bars() as progress:
        read_per_s, points = measure_packed(shape, form, work.rows, work.rounds, progress)
    asked: dict[str, Fact] = {
        "bits": work.bits,
        "group_size": work.group_size,
        "zero_points": "of each group" if work.has_zeros else "one for all",
        "read_tb_per_s": round(read_per_s / 1e12, 3),
        "rounds": work.rounds,
    }
    return Results(command="products", label=label or default_label(), facts=facts, work=asked, points=points)


def _shape_and_facts(config: EngineConfig) -> tuple[Shape, dict[str, Fact]]:
    """Of the model that the config names, on this card."""
    from pagedcore.models.source import resolve_model

    source = resolve_model(config)
    shape = _shape_of(source.model_dir, config.dtype)
    facts: dict[str, Fact] = {
        **software_facts(),
        "device": device_name("cuda"),
        "model": model_name(source.name),
        **model_shape(source.model_dir),
        "dtype": str(shape.dtype).removeprefix("torch."),
    }
    return shape, facts


def _shape_of(model_dir: Path, dtype: str) -> Shape:
    """The sizes that config.json says, with the dtype that a setting means for them."""
    import torch

    from pagedcore.commands.bench.roofline.case import Shape
    from pagedcore.models.registry import read_architecture, resolve_dtype

    model = read_architecture(model_dir)
    return Shape(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        dtype=resolve_dtype(dtype, model, torch.device("cuda")),
    )


def check_gpu(command: str) -> None:
    """Raise `ConfigError` where the kernels do not run."""
    import torch

    from pagedcore_kernels import has_triton

    if not torch.cuda.is_available():
        raise ConfigError(f"bench {command} measures Triton kernels and needs an NVIDIA GPU; torch finds none on this machine.")
    if not has_triton():
        raise ConfigError(f"bench {command} measures Triton kernels, and Triton is not installed: pip install triton")
