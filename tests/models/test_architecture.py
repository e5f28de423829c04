"""config.json is read as transformers reads it, and what is not covered is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedcore.batch import KVLayout
from pagedcore.errors import CheckpointError
from pagedcore.models.architecture import ModelArchitecture
from pagedcore.models.registry import read_architecture

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def make_architecture(**changes: Any) -> ModelArchitecture:
    return ModelArchitecture.from_config_dict({**SMOLLM2, **changes})


def test_the_embedded_models_config_is_read_whole() -> None:
    architecture = make_architecture()
    assert architecture.kv_layout == KVLayout(num_layers=30, num_kv_heads=3, head_dim=64)
    assert architecture.tied_embeddings
    assert architecture.rope.theta == 100000.0
    assert architecture.max_model_len == 8192
    assert architecture.rms_norm_eps == 1e-5
    assert architecture.dtype == "bfloat16"
    assert architecture.eos_token_ids == {2}
    assert [architecture.qkv_bias, architecture.out_bias, architecture.mlp_bias, architecture.qk_norm] == [False] * 4
    assert architecture.sliding_windows == (None,) * 30


def test_the_newer_spelling_of_the_dtype_is_read() -> None:
    config = {key: value for key, value in SMOLLM2.items() if key != "torch_dtype"}
    assert ModelArchitecture.from_config_dict({**config, "dtype": "float16"}).dtype == "float16"
    assert ModelArchitecture.from_config_dict(config).dtype is None


def test_model_type_names_the_family_where_architectures_is_missing() -> None:
    config = {key: value for key, value in SMOLLM2.items() if key != "architectures"}
    assert ModelArchitecture.from_config_dict({**config, "model_type": "qwen3"}).name == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("LlamaForCausalLM", {}, (False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True, False)),
        ("LlamaForCausalLM", {"mlp_bias": True}, (False, False, True)),
        ("MistralForCausalLM", {"attention_bias": True, "mlp_bias": True}, (False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases_are_those_of_the_family(name: str, changes: dict[str, Any], expected: tuple[bool, bool, bool]) -> None:
    architecture = make_architecture(architectures=[name], **changes)
    assert (architecture.qkv_bias, architecture.out_bias, architecture.mlp_bias) == expected


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, [None, None, None]),
        ("MistralForCausalLM", {"sliding_window": 8}, [8, 8, 8]),
        ("MistralForCausalLM", {"sliding_window": None}, [None, None, None]),
        ("MistralForCausalLM", {}, [4096, 4096, 4096]),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "max_window_layers": 0}, [None, None, None]),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, [None, None, 8]),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, [None, None, None]),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            [8, None, 8],
        ),
    ],
)
def test_sliding_windows_are_those_of_the_family(name: str, changes: dict[str, Any], expected: list[int | None]) -> None:
    assert list(make_architecture(architectures=[name], num_hidden_layers=3, **changes).sliding_windows) == expected


def test_head_dim_is_the_configs_or_the_familys_or_follows_from_the_heads() -> None:
    assert make_architecture(head_dim=128).head_dim == 128
    assert make_architecture(head_dim=None).head_dim == 64
    assert make_architecture(architectures=["Qwen3ForCausalLM"]).head_dim == 128


def test_missing_kv_heads_are_as_many_as_query_heads() -> None:
    assert make_architecture(num_key_value_heads=None).num_kv_heads == 9


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [({"eos_token_id": [3, 7]}, {3, 7}), ({"eos_token_id": 7}, {7}), ({"eos_token_id": None}, {2, 3}), ({"temperature": 1.0}, {2, 3})],
)
def test_end_tokens_are_all_of_generation_config_and_else_of_config(
    tmp_path: Path, generation_config: dict[str, Any], expected: set[int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMOLLM2, "eos_token_id": [2, 3]}))
    assert read_architecture(tmp_path).eos_token_ids == {2, 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert read_architecture(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("named", ["</s>", ["</s>"], {"id": 2}, 2.0])
def test_end_tokens_that_are_no_ids_are_refused(named: object) -> None:
    with pytest.raises(CheckpointError, match="must be a token id or a list of token ids"):
        make_architecture(eos_token_id=named)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_architecture(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    (tmp_path / "generation_config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None, "model_type": "mamba"}, ["mamba", "MistralForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_key_value_heads": 2}, ["num_attention_heads is 9", "2"]),
        ({"head_dim": 7}, ["head_dim is 7"]),
        ({"rope_scaling": {"rope_type": "ntk-ish", "factor": 2.0}}, ["ntk-ish", "yarn", "llama3"]),
        ({"rope_scaling": {"type": "linear"}}, ["linear", "factor"]),
        ({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, ["mrope_section"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, ["short_factor", "32"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["linear_attention"] * 30},
            ["layer_types", "sliding_attention"],
        ),
    ],
)
def test_what_is_not_covered_is_refused_by_name(changes: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(CheckpointError) as refusal:
        make_architecture(**changes)
    for text in named:
        assert text in str(refusal.value)


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read_architecture(tmp_path)
