"""A quantized checkpoint is recognised in each place that says so, and refused by its method's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedcore.errors import CheckpointError
from pagedcore.quant import detect_quantization, refuse_quantized


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"bits": 4}}, "unnamed"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ],
)
def test_config_json_names_the_method(config: dict[str, Any], expected: str | None, tmp_path: Path) -> None:
    assert detect_quantization(tmp_path, config) == expected


@pytest.mark.parametrize(("file_name", "expected"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")])
def test_files_beside_it_name_the_method(file_name: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / file_name).write_text(json.dumps({"bits": 4}))
    assert detect_quantization(tmp_path, {}) == expected
    (tmp_path / file_name).write_text(json.dumps({"quant_method": "other"}))
    assert detect_quantization(tmp_path, {}) == "other"


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_file_that_cannot_be_read_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"quantize_config\.json"):
        detect_quantization(tmp_path, {})


def test_the_refusal_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'awq'.*set model to the float16, bfloat16 or float32 checkpoint"):
        refuse_quantized(tmp_path, {"quantization_config": {"quant_method": "awq"}})
    refuse_quantized(tmp_path, {})
