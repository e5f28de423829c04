"""What a checkpoint says about its quantization, and whether the user said the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pagedcore.errors import CheckpointError, ConfigError
from pagedcore.json_file import read_json_object
from pagedcore.quant.awq import AwqFormat
from pagedcore.quant.checkpoint_format import CheckpointFormat
from pagedcore.quant.compressed_tensors import CompressedTensorsFormat
from pagedcore.quant.gptq import GptqFormat

FORMATS: dict[str, Callable[[Mapping[str, Any], str], CheckpointFormat]] = {
    "gptq": GptqFormat.from_settings,
    "awq": AwqFormat.from_settings,
    "compressed-tensors": CompressedTensorsFormat.from_settings,
}
FORMAT_OF_NAME = {"gptq_marlin": "gptq", "awq_marlin": "awq"} | {name: name for name in FORMATS}
"""The format that a `quantization` setting means; kernels are chosen by the engine."""

_CONFIG_KEYS = ("quantization_config", "compression_config")
_GPTQ_FILE = "quantize_config.json"
_OTHER_FILES = {_GPTQ_FILE: "gptq", "quant_config.json": "awq"}


def read_checkpoint_format(model_dir: Path, config: Mapping[str, Any], asked: str | None = None) -> CheckpointFormat | None:
    """The format named in config.json, else in quantize_config.json or quant_config.json beside it; None if unquantized.

    Raises `CheckpointError` for one that is not covered, `ConfigError` where `asked` (the `quantization` setting) names another.
    """
    found = _find_settings(model_dir, config)
    method = None if found is None else _method(*found)
    if asked is not None and FORMAT_OF_NAME[asked] != method:
        says = "says that it is not quantized" if method is None else f"says {method!r}"
        raise ConfigError(
            f"quantization is {asked!r} and the checkpoint in {model_dir} {says}; "
            "leave quantization unset, and it is read from the checkpoint."
        )
    if found is None or method is None:
        return None
    settings, where = found
    return FORMATS[method](settings, where)


def _find_settings(model_dir: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
    """The settings, and the file that holds them for messages."""
    for key in _CONFIG_KEYS:
        settings = config.get(key)
        if settings:
            if not isinstance(settings, dict):
                raise CheckpointError(f"{key} in {model_dir / 'config.json'} is {settings!r} and must be a JSON object.")
            _refuse_another_label(settings, model_dir)
            return _with_rules_in_order(settings, model_dir), f"{key} of {model_dir / 'config.json'}"
    for file_name, method in _OTHER_FILES.items():
        path = model_dir / file_name
        if path.is_file():
            return {"quant_method": method, **read_json_object(path)}, str(path)
    return None


def _with_rules_in_order(settings: dict[str, Any], model_dir: Path) -> dict[str, Any]:
    """Of `dynamic` rules the first that matches wins. transformers sorts config.json's keys; quantize_config.json keeps their order."""
    path = model_dir / _GPTQ_FILE
    if not settings.get("dynamic") or not path.is_file():
        return settings
    rules = read_json_object(path).get("dynamic")
    return {**settings, "dynamic": rules} if rules == settings["dynamic"] else settings


def _refuse_another_label(settings: Mapping[str, Any], model_dir: Path) -> None:
    """Raise `CheckpointError` where two files label the zero points of an asymmetric GPTQ model differently: content cannot tell."""
    path = model_dir / _GPTQ_FILE
    if settings.get("quant_method", "gptq") != "gptq" or settings.get("sym") is True or not path.is_file():
        return
    label, other = _label(settings) or "gptq", _label(read_json_object(path))
    if other is not None and other != label:
        raise CheckpointError(
            f"{model_dir / 'config.json'} labels the zero points {label!r}, as it does without checkpoint_format, and {path} {other!r}; "
            "correct the one that is wrong."
        )


def _label(settings: Mapping[str, Any]) -> str | None:
    label = settings.get("checkpoint_format") or settings.get("format")
    return label.lower() if isinstance(label, str) else None


def _method(settings: Mapping[str, Any], where: str) -> str:
    """Old AutoGPTQ files name no method in config.json; their keys are GPTQ's alone."""
    method = settings.get("quant_method") or ("gptq" if {"bits", "group_size", "desc_act"} <= settings.keys() else None)
    if not isinstance(method, str) or method not in FORMATS:
        raise CheckpointError(
            f"{where} names the quantization method {method!r}, which is not covered; set model to a checkpoint in one of "
            f"{', '.join(FORMATS)}, or to the float16, bfloat16 or float32 one that it was made from."
        )
    return method
