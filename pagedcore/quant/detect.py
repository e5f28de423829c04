"""Which quantization a checkpoint says it has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedcore.errors import CheckpointError


def detect_quantization(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    """The method named in config.json, else in quantize_config.json or quant_config.json beside it; None if unquantized."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if settings:
        return str(settings.get("quant_method") or "unnamed")
    for file_name, default in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        path = model_dir / file_name
        if path.is_file():
            return str(_read(path).get("quant_method") or default)
    return None


def refuse_quantized(model_dir: Path, config: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for a quantized checkpoint."""
    method = detect_quantization(model_dir, config)
    if method is not None:
        raise CheckpointError(
            f"{model_dir} is quantized with {method!r}, and this version loads unquantized checkpoints only; "
            "set model to the float16, bfloat16 or float32 checkpoint it was made from."
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} must hold a JSON object.")
    return settings
