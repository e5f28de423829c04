"""What a GPTQ config says about each module: the keys that decide storage are read, refused or of no matter, never guessed."""

from __future__ import annotations

from typing import Any

import pytest

from pagedcore.errors import CheckpointError
from pagedcore.quant.gptq import GptqFormat
from pagedcore.quant.gptq_layout import GptqLayout
from pagedcore.quant.gptq_zeros import ZeroStorage

BASE = {"bits": 4, "group_size": 64, "desc_act": False, "sym": True}
Q, DOWN, HEAD = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"


def read(**settings: Any) -> GptqFormat:
    return GptqFormat.from_settings(BASE | settings, "quantize_config.json")


def layout_of(module: str, **settings: Any) -> GptqLayout:
    layout = read(**settings).layout_of(module)
    assert layout is not None
    return layout


def quantized(*modules: str, **settings: Any) -> list[bool]:
    return [read(**settings).layout_of(module) is not None for module in modules]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "gptq 4-bit group 64"),
        ({"desc_act": True}, "gptq 4-bit group 64 act-order"),
        ({"bits": 8, "group_size": -1}, "gptq 8-bit channel"),
        ({"dynamic": {"-:.*down": {}, ".*up": {"bits": 4}}}, "gptq 4-bit group 64"),
        ({"dynamic": {".*up": {"bits": 8}}}, "gptq 4-bit group 64 with exceptions"),
    ],
)
def test_the_description_is_for_people(settings: dict[str, Any], expected: str) -> None:
    assert read(**settings).description == expected


def test_a_gptq_module_is_packed_if_its_qweight_is_there() -> None:
    assert (read().method, read().packed_suffix) == ("gptq", "qweight")


def test_a_config_as_gptqmodel_writes_it() -> None:
    stored = read(
        lm_head=False,
        method="gptq",
        quant_method="gptq",
        format="gptq",
        checkpoint_format="gptq",
        pack_dtype="int32",
        meta={"quantizer": ["gptqmodel:7.7.0"], "damp_percent": 0.05, "mse": 0.0},
        dynamic=None,
        modules_in_block_to_quantize=None,
    )
    expected = GptqLayout(
        bits=4, group_size=64, has_act_order=False, is_symmetric=True, zero_storage=ZeroStorage.MINUS_ONE, where="quantize_config.json"
    )
    assert stored.layout_of(Q) == stored.default_layout() == expected
    assert stored.layout_of(HEAD) is None


def test_a_config_as_autogptq_wrote_it() -> None:
    stored = read(
        damp_percent=0.01,
        static_groups=False,
        true_sequential=True,
        model_name_or_path=None,
        model_file_base_name="model",
        is_marlin_format=False,
    )
    assert stored.layout_of(Q) == read().layout


@pytest.mark.parametrize(
    ("names", "values"), [(("w_bit", "q_group_size"), (3, 32)), (("wbits", "group_size"), (2, -1)), (("bits", "q_group_size"), (8, 7))]
)
def test_bits_and_group_size_have_other_names_too(names: tuple[str, str], values: tuple[int, int]) -> None:
    layout = GptqFormat.from_settings(dict(zip(names, values, strict=True)), "x").layout
    assert (layout.bits, layout.group_size or -1) == values
    assert (layout.has_act_order, layout.is_symmetric) == (False, None)


@pytest.mark.parametrize("key", ["format", "checkpoint_format"])
@pytest.mark.parametrize(
    ("label", "expected"),
    [(None, ZeroStorage.MINUS_ONE), ("gptq", ZeroStorage.MINUS_ONE), ("gptq_v2", ZeroStorage.AS_IS), ("GPTQ_V2", ZeroStorage.AS_IS)],
)
def test_the_label_says_how_zero_points_are_stored(key: str, label: str | None, expected: ZeroStorage) -> None:
    assert read(**{key: label}).layout.zero_storage is expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": None}, "bits is None in quantize_config.json, and must be given: without it packed tensors cannot be read."),
        ({"bits": 5}, "bits is 5 in quantize_config.json, and gptq is covered with 2, 3, 4 and 8 bits."),
        ({"bits": "4"}, "bits is '4' in quantize_config.json, and must be a whole number."),
        ({"bits": True}, "bits is True in quantize_config.json, and must be a whole number."),
        ({"w_bit": 8}, "w_bit is 8 in quantize_config.json, and bits, which means the same, is 4."),
        ({"group_size": None}, "group_size is None in quantize_config.json, and must be given: without it packed tensors cannot be read."),
        ({"group_size": 0}, "group_size is 0 in quantize_config.json, and must be positive, or -1 for one group of all inputs."),
        ({"group_size": -2}, "group_size is -2 in quantize_config.json, and must be positive, or -1 for one group of all inputs."),
        (
            {"group_size": None, "q_group_size": 0},
            "q_group_size is 0 in quantize_config.json, and must be positive, or -1 for one group of all inputs.",
        ),
        ({"group_size": 64.0}, "group_size is 64.0 in quantize_config.json, and must be a whole number."),
        ({"desc_act": 1}, "desc_act is 1 in quantize_config.json, and must be true or false."),
        ({"sym": "yes"}, "sym is 'yes' in quantize_config.json, and must be true or false."),
        ({"lm_head": "no"}, "lm_head is 'no' in quantize_config.json, and must be true or false."),
        ({"pack_dtype": "int64"}, "pack_dtype is 'int64' in quantize_config.json, and is not covered; int32 is."),
        ({"format": "marlin"}, "format is 'marlin' in quantize_config.json, and is not covered; gptq and gptq_v2 are."),
        ({"format": 2}, "format is 2 in quantize_config.json, and is not covered; gptq and gptq_v2 are."),
        (
            {"checkpoint_format": "gptq_p"},
            "checkpoint_format is 'gptq_p' in quantize_config.json, and is not covered; gptq and gptq_v2 are.",
        ),
        (
            {"format": "gptq", "checkpoint_format": "gptq_v2"},
            "checkpoint_format is 'gptq_v2' in quantize_config.json, and format, which means the same, is 'gptq'.",
        ),
        ({"is_marlin_format": True}, "is_marlin_format is True in quantize_config.json, and the formats covered are gptq and gptq_v2."),
        (
            {"modules_to_not_convert": "lm_head"},
            "modules_to_not_convert is 'lm_head' in quantize_config.json, and must be a list of texts.",
        ),
        (
            {"modules_in_block_to_quantize": [["q_proj"], [3]]},
            "modules_in_block_to_quantize is ['q_proj', 3] in quantize_config.json, and must be a list of texts.",
        ),
        ({"inside_layer_modules": {}}, "inside_layer_modules is {} in quantize_config.json, and must be a list of texts."),
        ({"dynamic": [".*"]}, "dynamic is ['.*'] in quantize_config.json, and must be an object."),
        (
            {"dynamic": {"+:(": {}}},
            "dynamic is '+:(' in quantize_config.json, and is no regular expression (missing ), unterminated subpattern at position 0).",
        ),
        ({"dynamic": {".*": 8}}, "dynamic..* is 8 in quantize_config.json, and must be an object."),
        (
            {"dynamic": {"+:.*up": {"bits": 7}}},
            "dynamic .*up: bits is 7 in quantize_config.json, and gptq is covered with 2, 3, 4 and 8 bits.",
        ),
        ({"dynamic": {".*up": {"sym": 1}}}, "dynamic .*up: sym is 1 in quantize_config.json, and must be true or false."),
        (
            {"dynamic": {".*up": {"format": "gptq_v2"}}},
            "dynamic .*up: format is 'gptq_v2' in quantize_config.json, and holds for the whole file only.",
        ),
    ],
)
def test_what_is_malformed_or_not_covered_is_refused_with_key_value_and_file(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(**settings)
    assert str(caught.value) == message


def test_the_first_dynamic_rule_that_matches_decides() -> None:
    rules = {r"-:.*\.1\..*down": {}, r"+:.*\.1\.": {"bits": 8, "group_size": 32}, ".*q_proj": {"bits": 2}, r"model\.layers\.0": {"bits": 3}}
    assert quantized(DOWN, dynamic=rules) == [False]
    assert layout_of(Q, dynamic=rules) == layout_of(Q, bits=8, group_size=32)
    assert layout_of("model.layers.0.self_attn.q_proj", dynamic=rules).bits == 2
    assert layout_of("model.layers.0.mlp.up_proj", dynamic=rules).bits == 3
    assert layout_of("model.layers.2.mlp.up_proj", dynamic=rules) == read().layout


def test_a_dynamic_rule_matches_from_the_start_of_the_name_on() -> None:
    assert layout_of(DOWN, dynamic={"down_proj": {"bits": 8}}).bits == 4
    assert layout_of(DOWN, dynamic={"model.layers.1.mlp": {"bits": 8}}).bits == 8
    assert layout_of("model.layers.1.mlp.down_proj2", dynamic={DOWN: {"bits": 8}}).bits == 8
    assert layout_of("model.layers.1.mlp.down_proj2", dynamic={f"^{DOWN}$": {"bits": 8}}).bits == 4


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"desc_act": True}, {"desc_act": True}),
        ({"sym": False}, {"sym": False}),
        ({"group_size": -1, "bits": 3}, {"group_size": -1, "bits": 3}),
        ({"damp_percent": 0.1, "mse": 2.4, "hessian": {"chunk_size": 2}}, {}),
        ({}, {}),
        (None, {}),
    ],
)
def test_a_dynamic_rule_overrides_what_decides_storage(overrides: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    assert layout_of(Q, dynamic={".*q_proj": overrides}) == layout_of(Q, **expected)


@pytest.mark.parametrize("key", ["modules_in_block_to_quantize", "inside_layer_modules"])
@pytest.mark.parametrize("names", [["self_attn.q_proj", "up_proj"], [["self_attn.q_proj"], ["up_proj"]]])
def test_only_listed_modules_of_a_block_are_quantized(key: str, names: list[Any]) -> None:
    near = ["model.layers.1.mlp.gate_up_proj", "model.layers.1.other_self_attn.q_proj", "model.layers.1.self_attn.q_proj.lora"]
    assert quantized(Q, "model.layers.0.mlp.up_proj", "up_proj", DOWN, *near, **{key: names}) == [True] * 3 + [False] * 4
    assert quantized(HEAD, Q, **{key: names}, lm_head=True) == [True, True]


def test_an_empty_list_of_a_block_lists_nothing() -> None:
    assert quantized(Q, DOWN, modules_in_block_to_quantize=[]) == [True, True]


def test_modules_to_not_convert_are_whole_names_or_runs_of_their_components() -> None:
    rules = ["self_attn", "model.layers.3", DOWN, "lm_head"]
    modules = [Q, "model.layers.3.mlp.up_proj", DOWN, "lm_head"]
    others = ["model.layers.33.mlp.up_proj", f"{DOWN}2", "model.layers.1.my_self_attn.k", "model.layers.2.mlp.down_proj"]
    assert quantized(*modules, *others, modules_to_not_convert=rules, lm_head=True) == [False] * 4 + [True] * 4


def test_the_head_is_quantized_if_the_file_says_so() -> None:
    assert [quantized(HEAD, "model.lm_head", lm_head=said) for said in (None, False, True)] == [[False] * 2, [False] * 2, [True] * 2]
    assert quantized(HEAD, dynamic={".*": {"bits": 8}}) == [False]
    assert layout_of(HEAD, lm_head=True, dynamic={"lm_head": {"bits": 8, "group_size": 32}}) == layout_of(Q, bits=8, group_size=32)
    assert quantized(HEAD, lm_head=True, dynamic={"-:lm_head": {}}) == [False]
