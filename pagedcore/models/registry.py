"""From a model folder to a loaded decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pagedcore.config import DTYPES
from pagedcore.errors import CheckpointError, ConfigError
from pagedcore.models.architecture import ModelArchitecture
from pagedcore.models.checkpoint import Progress, load_dummy_weights, load_weights
from pagedcore.models.decoder import Decoder
from pagedcore.quant import refuse_quantized

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
        _read_json(model_dir / "config.json"), _read_json(generation_config) if generation_config.is_file() else None
    )


def resolve_dtype(name: str, architecture: ModelArchitecture, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations for a `dtype` setting. Raises `ConfigError` for an unknown name.

    "auto" is the checkpoint's own dtype, and float32 on a CPU: there results must not depend on the batch, and in bfloat16
    they do (docs/decisions/0006-float32-on-a-cpu.md).
    """
    if name in _TORCH_DTYPES:
        return _TORCH_DTYPES[name]
    if name != "auto":
        raise ConfigError(f"dtype is {name!r} and must be one of {', '.join(DTYPES)}.")
    return torch.float32 if device.type == "cpu" else _TORCH_DTYPES[architecture.dtype or "float32"]


def load_model(
    model_dir: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    seed: int,
    max_model_len: int | None,
    progress: Progress | None = None,
) -> Decoder:
    """Build the decoder of a folder and fill it.

    `load_format` "dummy" needs config.json alone and draws weights from `seed`; "auto" and "safetensors" read the files.
    `max_model_len` None is the model's own limit. Raises `CheckpointError` for files that cannot be used.
    """
    model_dir = Path(model_dir)
    architecture = read_architecture(model_dir)
    refuse_quantized(model_dir, _read_json(model_dir / "config.json"))
    decoder = Decoder(architecture, dtype=dtype, device=device, max_model_len=max_model_len or architecture.max_model_len)
    if load_format == "dummy":
        load_dummy_weights(decoder, seed, progress)
    else:
        load_weights(model_dir, decoder, progress)
    return decoder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} must hold a JSON object.")
    return settings
