"""`pagedcore bench kernels`: what the kernels of a model's shape reach of the card's own speed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pagedcore.commands.bench.facts import default_label, device_name, model_name, model_shape, software_facts
from pagedcore.commands.bench.results import Fact, Results
from pagedcore.commands.progress_bars import progress_bars
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError

if TYPE_CHECKING:
    from pagedcore.commands.bench.roofline.case import Shape


def run_kernels(config: EngineConfig, num_rounds: int, label: str | None) -> Results:
    """Raises `ConfigError` on a machine without a CUDA device or without Triton, and what finding the model raises."""
    check_gpu()
    from pagedcore.commands.bench.roofline.measure import measure_kernels
    from pagedcore.models.source import resolve_model

    source = resolve_model(config)
    shape = _shape_of(source.model_dir, config.dtype)
    with progress_bars() as progress:
        roofs, points = measure_kernels(shape, num_rounds, progress)
    facts: dict[str, Fact] = {
        **software_facts(),
        "device": device_name("cuda"),
        "model": model_name(source.name),
        **model_shape(source.model_dir),
        "dtype": str(shape.dtype).removeprefix("torch."),
    }
    asked: dict[str, Fact] = {
        "read_tb_per_s": round(roofs.read_bytes_per_s / 1e12, 3),
        "copy_tb_per_s": round(roofs.copy_bytes_per_s / 1e12, 3),
        "matmul_tflop_per_s": round(roofs.matmul_flops_per_s / 1e12, 1),
        "rounds": num_rounds,
    }
    return Results(command="kernels", label=label or default_label(), facts=facts, work=asked, points=points)


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


def check_gpu() -> None:
    """Raise `ConfigError` where the kernels do not run."""
    import torch

    from pagedcore_kernels import has_triton

    if not torch.cuda.is_available():
        raise ConfigError("bench kernels measures Triton kernels and needs an NVIDIA GPU; torch finds none on this machine.")
    if not has_triton():
        raise ConfigError("bench kernels measures Triton kernels, and Triton is not installed: pip install triton")
