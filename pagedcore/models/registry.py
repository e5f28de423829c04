"""From a model folder to a loaded decoder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from pagedcore.errors import CheckpointError, ConfigError
from pagedcore.json_file import read_json_object
from pagedcore.models.architecture import ModelArchitecture
from pagedcore.models.checkpoint import Progress, SafetensorsSource, load_dummy_weights
from pagedcore.models.decoder import Decoder
from pagedcore.quant import LinearFactory, read_checkpoint_format
from pagedcore.quant.checkpoint_format import CheckpointFormat

_TORCH_DTYPES = {
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float": torch.float32,
}


def read_architecture(model_dir: str | Path) -> ModelArchitecture:
    """Read config.json, and the end tokens of generation_config.json. Raises `CheckpointError` for what is not covered."""
    model_dir = Path(model_dir)
    generation_config = model_dir / "generation_config.json"
    return ModelArchitecture.from_config_dict(
        read_json_object(model_dir / "config.json"), read_json_object(generation_config) if generation_config.is_file() else None
    )


def resolve_dtype(name: str, architecture: ModelArchitecture, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations for a `dtype` setting. Raises `ConfigError` for an unknown name.

    "auto" is the checkpoint's own dtype, and float32 on a CPU: there results must not depend on the batch, and in bfloat16
    they do (docs/decisions/0006-float32-on-a-cpu.md).
    """
    if name in _TORCH_DTYPES:
        return _TORCH_DTYPES[name]
    if name != "auto":
        raise ConfigError(f"dtype is {name!r} and must be one of {', '.join(('auto', *_TORCH_DTYPES))}.")
    return torch.float32 if device.type == "cpu" else _TORCH_DTYPES[architecture.dtype or "float32"]


def load_model(
    model_dir: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    seed: int,
    max_model_len: int | None,
    quantization: str | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """Build the decoder of a folder and fill it.

    `load_format` "dummy" needs config.json alone and draws weights from `seed`; "auto" and "safetensors" read the files.
    `max_model_len` None is the model's own limit. Raises `CheckpointError` for files that cannot be used, `ConfigError` where
    `quantization` contradicts them.
    """
    model_dir = Path(model_dir)
    architecture = read_architecture(model_dir)
    stored = read_quantization(model_dir, quantization)

    def build(present: Collection[str] | None) -> Decoder:
        linears = LinearFactory(dtype=dtype, checkpoint_format=stored, present=present)
        limit = max_model_len or architecture.max_model_len
        return Decoder(architecture, dtype=dtype, device=device, max_model_len=limit, linears=linears)

    if load_format == "dummy":
        decoder = build(None)
        load_dummy_weights(decoder, seed, progress)
        return decoder
    with SafetensorsSource(model_dir, dtype, device, progress) as source:
        if stored is not None and not any(name.endswith(f".{stored.packed_suffix}") for name in source.names):
            raise CheckpointError(
                f"{model_dir} says that it is {stored.description} and holds no packed tensor (*.{stored.packed_suffix}); "
                "remove the quantization settings from its config if it is the unquantized model."
            )
        decoder = build(source.names)
        source.fill(decoder)
    return decoder


def read_quantization(model_dir: str | Path, asked: str | None = None) -> CheckpointFormat | None:
    """How the folder says that its matrices are stored; None if unquantized. See `read_checkpoint_format`."""
    return read_checkpoint_format(Path(model_dir), read_json_object(Path(model_dir) / "config.json"), asked)
