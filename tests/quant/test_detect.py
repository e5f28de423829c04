"""Which quantization a checkpoint has is read from the places that say so, never guessed, and the user may only agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedcore.config_checks import QUANTIZATION_NAMES
from pagedcore.errors import CheckpointError, ConfigError
from pagedcore.quant import read_checkpoint_format
from pagedcore.quant.detect import FORMAT_OF_NAME, FORMATS
from pagedcore.quant.gptq import GptqFormat
from pagedcore.quant.gptq_layout import GptqLayout

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}


def without(settings: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quantization_config": GPTQ}, "gptq"),
        ({"quantization_config": without(GPTQ, "quant_method")}, "gptq"),
        ({"quantization_config": AWQ}, "awq"),
        ({"quantization_config": COMPRESSED}, "compressed-tensors"),
        ({"compression_config": COMPRESSED}, "compressed-tensors"),
    ],
)
def test_config_json_names_the_method(config: dict[str, Any], method: str, tmp_path: Path) -> None:
    found = read_checkpoint_format(tmp_path, config)
    assert found is not None
    assert found.method == method
    assert found.description.startswith(f"{method} 4-bit group 128")


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_a_config_without_settings_is_unquantized(config: dict[str, Any], tmp_path: Path) -> None:
    assert read_checkpoint_format(tmp_path, config) is None


@pytest.mark.parametrize(("file_name", "settings"), [("quantize_config.json", GPTQ), ("quant_config.json", AWQ)])
def test_a_file_beside_it_names_the_method(file_name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / file_name).write_text(json.dumps(without(settings, "quant_method")))
    found = read_checkpoint_format(tmp_path, {})
    assert found is not None
    assert found.method == settings["quant_method"]
    (tmp_path / file_name).write_text(json.dumps(COMPRESSED))
    found = read_checkpoint_format(tmp_path, {})
    assert found is not None
    assert found.method == "compressed-tensors"


def test_config_json_comes_before_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(json.dumps(GPTQ))
    found = read_checkpoint_format(tmp_path, {"quantization_config": AWQ})
    assert found is not None
    assert found.method == "awq"


def test_rules_keep_the_order_of_the_file_that_was_not_sorted(tmp_path: Path) -> None:
    """transformers sorts config.json; the first rule that matches wins."""
    rules = {r"+:.*down_proj": {"bits": 8}, r"+:.*": {"bits": 2}}
    (tmp_path / "quantize_config.json").write_text(json.dumps({**GPTQ, "dynamic": rules}))
    found = read_checkpoint_format(tmp_path, {"quantization_config": {**GPTQ, "dynamic": dict(sorted(rules.items()))}})
    assert isinstance(found, GptqFormat)
    assert [layout_bits(found, module) for module in ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj")] == [8, 2]


def layout_bits(found: GptqFormat, module: str) -> int:
    layout = found.layout_of(module)
    assert isinstance(layout, GptqLayout)
    return layout.bits


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_file_that_cannot_be_read_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"quantize_config\.json"):
        read_checkpoint_format(tmp_path, {})


@pytest.mark.parametrize(
    "settings", [{"quant_method": "bitsandbytes", "bits": 4}, {"bits": 4}, {"quant_method": 7}, {"quant_method": ["gptq"]}]
)
def test_other_methods_are_refused_with_what_is_covered(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not covered; set model to a checkpoint in one of gptq, awq, compressed-tensors, or"):
        read_checkpoint_format(tmp_path, {"quantization_config": settings})


@pytest.mark.parametrize("label", ["gptq", None])
def test_labels_of_zero_points_that_contradict_each_other_are_refused(label: str | None, tmp_path: Path) -> None:
    """The zero points of an asymmetric model cannot show which of the files is right."""
    config = {"quantization_config": {**GPTQ, "sym": False, "checkpoint_format": label}}
    beside = tmp_path / "quantize_config.json"
    beside.write_text(json.dumps({**GPTQ, "sym": False, "checkpoint_format": "gptq"}))
    assert read_checkpoint_format(tmp_path, config) is not None
    beside.write_text(json.dumps({**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}))
    with pytest.raises(CheckpointError, match=r"config\.json labels the zero points 'gptq'.*quantize_config\.json 'gptq_v2'"):
        read_checkpoint_format(tmp_path, config)
    config["quantization_config"]["sym"] = True
    assert read_checkpoint_format(tmp_path, config) is not None


@pytest.mark.parametrize("expression", ["(", "a{99999999999999999999}", "(" * 2000 + ")" * 2000])
def test_expressions_that_python_cannot_compile_are_refused(expression: str, tmp_path: Path) -> None:
    for settings in ({**GPTQ, "dynamic": {expression: {}}}, {**COMPRESSED, "ignore": [f"re:{expression}"]}):
        with pytest.raises(CheckpointError, match="is no regular expression"):
            read_checkpoint_format(tmp_path, {"quantization_config": settings})


def test_settings_that_are_no_object_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"quantization_config in .* must be a JSON object"):
        read_checkpoint_format(tmp_path, {"quantization_config": "gptq"})


def test_every_name_of_the_setting_means_a_format() -> None:
    assert set(QUANTIZATION_NAMES) == set(FORMAT_OF_NAME)
    assert set(FORMAT_OF_NAME.values()) == set(FORMATS)


def test_the_user_may_only_agree(tmp_path: Path) -> None:
    assert read_checkpoint_format(tmp_path, {"quantization_config": GPTQ}, "gptq_marlin") is not None
    with pytest.raises(ConfigError, match=r"quantization is 'awq' and the checkpoint in .* says 'gptq'"):
        read_checkpoint_format(tmp_path, {"quantization_config": GPTQ}, "awq")
    with pytest.raises(ConfigError, match=r"quantization is 'gptq' and the checkpoint in .* says that it is not quantized"):
        read_checkpoint_format(tmp_path, {}, "gptq")
