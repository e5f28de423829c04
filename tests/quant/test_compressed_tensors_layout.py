"""compressed-tensors pack-quantized: hand-made words, an independent packer, and what the config may say."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedcore.errors import CheckpointError
from pagedcore.quant.checkpoint_format import CheckpointFormat
from pagedcore.quant.compressed_tensors import CompressedTensorsFormat
from pagedcore.quant.compressed_tensors_layout import PackQuantizedLayout
from pagedcore.quant.quantized_matrix import QuantizedMatrix
from support.compressed_tensors_writer import pack_bits, pack_columns, write_compressed_tensors

NAME = "model.layers.0.mlp.up_proj"
WHERE = "quantization_config of /m/config.json"
OTHER_TOOL: dict[str, Any] = {"observer": "minmax", "observer_kwargs": {}, "zp_dtype": None, "block_structure": None}


def read(layout: PackQuantizedLayout, tensors: dict[str, Tensor], out_features: int, in_features: int) -> QuantizedMatrix:
    """Unpack what the layout declares, cast as a loader casts it."""
    specs = layout.declare(NAME, in_features, out_features, tensors)
    assert specs.keys() == tensors.keys()
    assert all(tuple(tensors[name].shape) in (spec.shape, *spec.other_shapes) for name, spec in specs.items())
    return layout.unpack(NAME, in_features, out_features, {name: tensors[name].to(spec.dtype) for name, spec in specs.items()})


def make_settings(weights: dict[str, Any] | None = None, group: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    base = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False, "actorder": None}
    scheme = {"targets": ["Linear"], "weights": base | (weights or {}), "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme | (group or {})},
    } | settings


def make_format(weights: dict[str, Any] | None = None, group: dict[str, Any] | None = None, **settings: Any) -> CompressedTensorsFormat:
    return CompressedTensorsFormat.from_settings(make_settings(weights, group, **settings), WHERE)


def words(*values: int) -> Tensor:
    return torch.tensor([value - 2**32 if value >= 2**31 else value for value in values], dtype=torch.int32)


def test_four_bit_words_hold_signed_integers_plus_eight_lowest_first() -> None:
    tensors = {f"{NAME}.weight_packed": words(0x76543210, 0xFEDCBA98)[None], f"{NAME}.weight_scale": torch.tensor([[0.5, 2.0]])}
    matrix = read(PackQuantizedLayout(4, 8, True), tensors, 1, 16)
    assert matrix.zeros.tolist() == [[8, 8]]
    assert matrix.dequantize(torch.float32).tolist() == [
        [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    ]


def test_eight_bit_words_hold_signed_integers_plus_128() -> None:
    tensors = {f"{NAME}.weight_packed": words(0xFF7F8100, 0x80)[None], f"{NAME}.weight_scale": torch.tensor([[1.0]])}
    assert read(PackQuantizedLayout(8, None, True), tensors, 1, 5).dequantize(torch.float32).tolist() == [[-128.0, 1.0, -1.0, 127.0, 0.0]]


def test_packed_zero_points_run_down_the_outputs() -> None:
    codes = words(*[0x88888888] * 9)[:, None]  # nine outputs, eight inputs in two groups, all codes 0
    tensors = {
        f"{NAME}.weight_packed": codes,
        f"{NAME}.weight_scale": torch.ones(9, 2),
        f"{NAME}.weight_zero_point": torch.stack([words(0x76543210, 0x9), words(0x88888888, 0xF)], 1),
    }
    matrix = read(PackQuantizedLayout(4, 4, False), tensors, 9, 8)
    assert matrix.zeros.tolist() == [[0, 8], [1, 8], [2, 8], [3, 8], [4, 8], [5, 8], [6, 8], [7, 8], [9, 15]]
    assert matrix.dequantize(torch.float32)[:, [0, 4]].T.tolist() == [
        [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, -1.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -7.0],
    ]


def test_signed_zero_points_of_older_tools_mean_the_same() -> None:
    tensors = {
        f"{NAME}.weight_packed": words(*[0x88888888] * 3)[:, None],
        f"{NAME}.weight_scale": torch.ones(3, 1),
        f"{NAME}.weight_zero_point": torch.tensor([[-8], [0], [7]], dtype=torch.int8),
    }
    matrix = read(PackQuantizedLayout(4, None, False), tensors, 3, 8)
    assert matrix.zeros.tolist() == [[0], [8], [15]]
    assert matrix.dequantize(torch.float32)[:, 0].tolist() == [8.0, 0.0, -7.0]


@pytest.mark.parametrize("zero_points", ["none", "packed", "signed"])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("in_features", "group_size"), [(64, 32), (64, 16), (256, 128), (77, -1), (105, 7)])
@pytest.mark.parametrize("out_features", [24, 13])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_stored_matrix_is_read_bit_for_bit(
    bits: int, out_features: int, in_features: int, group_size: int, act_order: bool, zero_points: str
) -> None:
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, in_features, generator=generator) * 0.02 + (0.0 if zero_points == "none" else 0.01)
    tensors: dict[str, Tensor] = {}
    expected = write_compressed_tensors(
        tensors,
        NAME,
        weight,
        bits=bits,
        group_size=group_size,
        symmetric=zero_points == "none",
        act_order=act_order,
        packed_zero_points=zero_points == "packed",
    )
    layout = PackQuantizedLayout(bits, None if group_size == -1 else group_size, zero_points == "none", act_order)
    matrix = read(layout, tensors, out_features, in_features)
    assert (matrix.bits, matrix.num_groups) == (bits, 1 if group_size == -1 else in_features // group_size)
    assert (matrix.group_of_input is not None) is (act_order and group_size != -1)
    assert torch.equal(matrix.dequantize(torch.float32), expected)
    assert (expected - weight).abs().max() < {2: 0.06, 3: 0.03, 4: 0.02, 8: 0.002}[bits]


@given(st.sampled_from([2, 3, 4, 8]), st.data())
def test_every_integer_comes_back_along_either_dimension(bits: int, data: st.DataObject) -> None:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    values = data.draw(st.lists(st.integers(low, high), min_size=1, max_size=70))
    zeros = data.draw(st.lists(st.integers(low, high), min_size=2, max_size=40))
    tensors = {
        f"{NAME}.weight_packed": torch.tensor([pack_bits([value - low for value in values], bits)] * len(zeros), dtype=torch.int32),
        f"{NAME}.weight_scale": torch.ones(len(zeros), 1),
        f"{NAME}.weight_zero_point": pack_columns([[zero] for zero in zeros], bits),
    }
    matrix = read(PackQuantizedLayout(bits, None, False), tensors, len(zeros), len(values))
    assert matrix.dequantize(torch.float32).tolist() == [[value - zero for value in values] for zero in zeros]


def test_only_what_the_file_needs_or_holds_is_declared() -> None:
    every = {f"{NAME}.weight_{end}" for end in ("packed", "scale", "zero_point", "g_idx", "shape")}
    needed = {f"{NAME}.weight_{end}" for end in ("packed", "scale")}
    layout = PackQuantizedLayout(4, 32, True)
    assert layout.declare(NAME, 64, 12, None).keys() == layout.declare(NAME, 64, 12, set()).keys() == needed
    assert layout.declare(NAME, 64, 12, every | {"other.weight_g_idx"}).keys() == every
    assert PackQuantizedLayout(4, 32, False).declare(NAME, 64, 12, None).keys() == needed | {f"{NAME}.weight_zero_point"}
    assert PackQuantizedLayout(4, 32, True, True).declare(NAME, 64, 12, set()).keys() == needed | {f"{NAME}.weight_g_idx"}


def test_declared_shapes_are_those_of_the_format() -> None:
    every = {f"{NAME}.weight_{end}" for end in ("packed", "scale", "zero_point", "g_idx", "shape")}
    specs = PackQuantizedLayout(3, 32, False).declare(NAME, 96, 20, every)
    assert {name.rpartition(".")[2]: (spec.shape, spec.other_shapes, spec.dtype) for name, spec in specs.items()} == {
        "weight_packed": ((20, 9), (), torch.int32),
        "weight_scale": ((20, 3), (), torch.float32),
        "weight_zero_point": ((2, 3), ((20, 3),), torch.int32),
        "weight_g_idx": ((96,), (), torch.int32),
        "weight_shape": ((2,), (), torch.int32),
    }
    assert {spec.reason for spec in specs.values()} == {"compressed-tensors 3-bit group 32 asymmetric"}


@pytest.mark.parametrize("g_idx", [[-1] * 8, [0, 0, 0, 0, 1, 1, 1, 1]])
def test_a_g_idx_that_is_unset_or_in_order_needs_no_reordering(g_idx: list[int]) -> None:
    tensors: dict[str, Tensor] = {}
    expected = write_compressed_tensors(tensors, NAME, torch.eye(8), bits=4, group_size=4)
    tensors[f"{NAME}.weight_g_idx"] = torch.tensor(g_idx, dtype=torch.int32)
    matrix = read(PackQuantizedLayout(4, 4, True), tensors, 8, 8)
    assert matrix.group_of_input is None
    assert torch.equal(matrix.dequantize(torch.float32), expected)


def test_a_g_idx_that_the_config_does_not_speak_of_is_followed() -> None:
    tensors: dict[str, Tensor] = {}
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    expected = write_compressed_tensors(tensors, NAME, weight, bits=4, group_size=16, act_order=True)
    assert torch.equal(read(PackQuantizedLayout(4, 16, True), tensors, 8, 64).dequantize(torch.float32), expected)


@pytest.mark.parametrize(("value", "low", "high"), [(2, 0, 2), (-1, -1, 1)])
def test_a_g_idx_beyond_the_groups_is_refused(value: int, low: int, high: int) -> None:
    tensors: dict[str, Tensor] = {}
    write_compressed_tensors(tensors, NAME, torch.eye(8), bits=4, group_size=4, act_order=True)
    tensors[f"{NAME}.weight_g_idx"][3] = value
    with pytest.raises(CheckpointError, match=f"{NAME}.weight_g_idx holds groups from {low} to {high}, and the matrix has 0 to 1; fetch"):
        read(PackQuantizedLayout(4, 4, True, True), tensors, 8, 8)


@pytest.mark.parametrize("zero_point", [words(0x88888888)[:, None], torch.zeros(8, 1, dtype=torch.int8)])
def test_a_symmetric_file_may_hold_zero_points_of_zero(zero_point: Tensor) -> None:
    tensors: dict[str, Tensor] = {}
    expected = write_compressed_tensors(tensors, NAME, torch.eye(8), bits=4, group_size=-1)
    tensors[f"{NAME}.weight_zero_point"] = zero_point
    assert torch.equal(read(PackQuantizedLayout(4, None, True), tensors, 8, 8).dequantize(torch.float32), expected)


@pytest.mark.parametrize("zero_point", [words(0x88888889)[:, None], torch.tensor([[0]] * 7 + [[-1]], dtype=torch.int8)])
def test_a_symmetric_file_with_other_zero_points_is_refused(zero_point: Tensor) -> None:
    tensors: dict[str, Tensor] = {}
    write_compressed_tensors(tensors, NAME, torch.eye(8), bits=4, group_size=-1)
    tensors[f"{NAME}.weight_zero_point"] = zero_point
    with pytest.raises(CheckpointError, match=f"{NAME}.weight_zero_point holds zero points other than 0, .* says symmetric; correct"):
        read(PackQuantizedLayout(4, None, True), tensors, 8, 8)


@pytest.mark.parametrize("value", [-9, 8])
def test_signed_zero_points_beyond_the_bits_are_refused(value: int) -> None:
    tensors: dict[str, Tensor] = {}
    write_compressed_tensors(tensors, NAME, torch.eye(8), bits=4, group_size=-1, symmetric=False, packed_zero_points=False)
    tensors[f"{NAME}.weight_zero_point"][2] = value
    with pytest.raises(CheckpointError, match=rf"weight_zero_point holds zero points from .*{value}.*, and 4 bits hold -8 to 7; fetch"):
        read(PackQuantizedLayout(4, None, False), tensors, 8, 8)


def test_a_weight_shape_that_contradicts_config_json_is_refused() -> None:
    tensors: dict[str, Tensor] = {}
    write_compressed_tensors(tensors, NAME, torch.eye(8), bits=4, group_size=-1)
    tensors[f"{NAME}.weight_shape"] = torch.tensor([8, 7])
    with pytest.raises(CheckpointError, match=rf"{NAME}.weight_shape is \[8, 7\], and config.json makes the matrix \[8, 8\]"):
        read(PackQuantizedLayout(4, None, True), tensors, 8, 8)


def test_inputs_that_the_group_size_does_not_divide_are_refused_by_name_and_size() -> None:
    for use in ("declare", "unpack"):
        with pytest.raises(
            CheckpointError, match=rf"{re.escape(NAME)} has 576 inputs and 192 outputs, .*group_size 128 does not divide 576"
        ):
            getattr(PackQuantizedLayout(4, 128, True), use)(NAME, 576, 192, {f"{NAME}.weight_{end}": None for end in ("packed", "scale")})


@pytest.mark.parametrize("has_act_order", [False, True])
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, None])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_random_weights_are_as_large_as_real_ones(bits: int, group_size: int | None, is_symmetric: bool, has_act_order: bool) -> None:
    layout = PackQuantizedLayout(bits, group_size, is_symmetric, has_act_order)
    specs = layout.declare(NAME, 512, 264, None)
    drawn = {name: spec.dummy(torch.Generator().manual_seed(1)) for name, spec in specs.items() if spec.dummy is not None}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in drawn.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in specs.items()
    }
    matrix = layout.unpack(NAME, 512, 264, drawn)
    assert matrix.dequantize(torch.float32).std().item() == pytest.approx(0.02, rel=0.1)
    if has_act_order and group_size is not None:
        assert matrix.group_of_input is not None
        assert matrix.group_of_input.bincount().tolist() == [32] * 16


@pytest.mark.parametrize(
    ("weights", "description", "layout"),
    [
        ({}, "4-bit group 128 symmetric", PackQuantizedLayout(4, 128, True)),
        (OTHER_TOOL, "4-bit group 128 symmetric", PackQuantizedLayout(4, 128, True)),
        ({"symmetric": False, "group_size": 32}, "4-bit group 32 asymmetric", PackQuantizedLayout(4, 32, False)),
        ({"num_bits": 8, "strategy": "channel", "group_size": None}, "8-bit channel symmetric", PackQuantizedLayout(8, None, True)),
        ({"num_bits": 8, "strategy": None, "group_size": -1}, "8-bit channel symmetric", PackQuantizedLayout(8, None, True)),
        ({"strategy": None}, "4-bit group 128 symmetric", PackQuantizedLayout(4, 128, True)),
        ({"strategy": "GROUP", "type": "INT"}, "4-bit group 128 symmetric", PackQuantizedLayout(4, 128, True)),
        ({"actorder": "group"}, "4-bit group 128 symmetric act-order", PackQuantizedLayout(4, 128, True, True)),
        ({"actorder": "dynamic"}, "4-bit group 128 symmetric act-order", PackQuantizedLayout(4, 128, True, True)),
        ({"actorder": True}, "4-bit group 128 symmetric act-order", PackQuantizedLayout(4, 128, True, True)),
        ({"actorder": "weight"}, "4-bit group 128 symmetric", PackQuantizedLayout(4, 128, True)),
        ({"actorder": "static"}, "4-bit group 128 symmetric", PackQuantizedLayout(4, 128, True)),
        ({"actorder": False}, "4-bit group 128 symmetric", PackQuantizedLayout(4, 128, True)),
    ],
)
def test_weight_settings_become_a_layout(weights: dict[str, Any], description: str, layout: PackQuantizedLayout) -> None:
    stored: CheckpointFormat = make_format(weights)
    assert (stored.method, stored.packed_suffix) == ("compressed-tensors", "weight_packed")
    assert stored.description == f"compressed-tensors {description}"
    assert stored.layout_of(NAME) == stored.default_layout() == layout


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization_status": "frozen"},
        {"quantization_status": None},
        {"sparsity_config": {}},
        {"sparsity_config": {"format": "dense", "global_sparsity": 0.1, "sparsity_structure": "unstructured"}},
        {"transform_config": {"config_groups": {}}},
        {"ignore": None},
        {"version": "0.12.2", "moe_sparsity_config": None},
    ],
)
def test_settings_that_change_nothing_are_taken(settings: dict[str, Any]) -> None:
    assert make_format(**settings).layout_of(NAME) == PackQuantizedLayout(4, 128, True)


_GROUP = "config_groups.group_0."
_ACTIVATIONS = "quantized activations are not covered: use a W4A16 or W8A16 checkpoint."


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "int-quantized"}, "format is 'int-quantized' in {}, and is not covered; pack-quantized and mixed-precision are."),
        (
            {"format": "nvfp4-pack-quantized"},
            "format is 'nvfp4-pack-quantized' in {}, and is not covered; pack-quantized and mixed-precision are.",
        ),
        ({"format": None}, "format is None in {}, and is not covered; pack-quantized and mixed-precision are."),
        (
            {"quantization_status": "initialized"},
            "quantization_status is 'initialized' in {}, and is not covered; compressed and frozen are.",
        ),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is {{'num_bits': 8}} in {}, and a quantized KV cache is not covered."),
        (
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format is 'sparse-24-bitmask' in {}, and is not covered; dense is.",
        ),
        (
            {"transform_config": {"config_groups": {"R1": 1}}},
            "transform_config is {{'config_groups': {{'R1': 1}}}} in {}, and transformed activations are not covered.",
        ),
        ({"config_groups": {}}, "config_groups is {{}} in {}, and must name at least one module that is quantized."),
        ({"config_groups": []}, "config_groups is [] in {}, and must be an object."),
        ({"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16 is ['Linear'] in {}, and must be an object."),
        ({"ignore": "lm_head"}, "ignore is 'lm_head' in {}, and must be a list of texts."),
        ({"ignore": ["re:("]}, "ignore is 're:(' in {}, and is no regular expression (missing ), unterminated subpattern at position 0)."),
        ({"group": {"targets": ["re:*"]}}, "targets is 're:*' in {}, and is no regular expression (nothing to repeat at position 0)."),
        ({"group": {"targets": "Linear"}}, _GROUP + "targets is 'Linear' in {}, and must be a list of texts."),
        ({"group": {"weights": None}}, _GROUP + "weights is None in {}, and a group that quantizes no weights is not covered."),
        ({"group": {"format": "float-quantized"}}, _GROUP + "format is 'float-quantized' in {}, and is not covered; pack-quantized is."),
        ({"format": "mixed-precision"}, _GROUP + "format is None in {}, and is not covered; pack-quantized is."),
        ({"group": {"input_activations": {"num_bits": 8}}}, _GROUP + "input_activations is {{'num_bits': 8}} in {}, and " + _ACTIVATIONS),
        ({"group": {"output_activations": {"num_bits": 8}}}, _GROUP + "output_activations is {{'num_bits': 8}} in {}, and " + _ACTIVATIONS),
        ({"weights": {"num_bits": 5}}, _GROUP + "weights.num_bits is 5 in {}, and weights are covered with 2, 3, 4, 8 bits."),
        ({"weights": {"num_bits": "4"}}, _GROUP + "weights.num_bits is '4' in {}, and must be a whole number."),
        ({"weights": {"type": "float"}}, _GROUP + "weights.type is 'float' in {}, and is not covered; int is."),
        ({"weights": {"strategy": "block"}}, _GROUP + "weights.strategy is 'block' in {}, and is not covered; group and channel are."),
        ({"weights": {"strategy": "tensor"}}, _GROUP + "weights.strategy is 'tensor' in {}, and is not covered; group and channel are."),
        (
            {"weights": {"block_structure": [2, 2]}},
            _GROUP + "weights.block_structure is [2, 2] in {}, and weights in blocks are not covered.",
        ),
        ({"weights": {"group_size": None}}, _GROUP + "weights.group_size is None in {}, and must be positive with strategy group."),
        ({"weights": {"strategy": "channel"}}, _GROUP + "weights.group_size is 128 in {}, and must be -1 or absent with strategy channel."),
        ({"weights": {"symmetric": 1}}, _GROUP + "weights.symmetric is 1 in {}, and must be true or false."),
        (
            {"weights": {"dynamic": True}},
            _GROUP + "weights.dynamic is True in {}, and weights must have been quantized before they were stored.",
        ),
        (
            {"weights": {"actorder": "desc"}},
            _GROUP + "weights.actorder is 'desc' in {}, and must be null, weight, static, group or dynamic.",
        ),
    ],
)
def test_what_is_malformed_or_not_covered_is_refused_with_key_value_and_file(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        make_format(**settings)
    assert str(refused.value) == message.format(WHERE)


@pytest.mark.parametrize(
    ("ignore", "module", "is_packed"),
    [
        (["lm_head"], "lm_head", False),
        ([], "lm_head", True),
        (["mlp"], NAME, True),
        ([NAME], NAME, False),
        (["re:.*up_proj"], NAME, False),
        (["re:up_proj"], NAME, True),
        (["re:model.layers.0"], NAME, False),
        (["Linear"], NAME, False),
    ],
)
def test_ignored_modules_are_named_whole_or_matched_from_the_start(ignore: list[str], module: str, is_packed: bool) -> None:
    assert (make_format(ignore=ignore).layout_of(module) is not None) is is_packed


def test_names_go_before_patterns_and_patterns_in_order_of_their_text_before_classes() -> None:
    groups = {
        name: {"targets": targets, "weights": {"num_bits": bits, "group_size": 32}, "format": "pack-quantized"}
        for name, targets, bits in [
            ("a", ["Linear"], 2),
            ("b", ["re:.*mlp.down", "re:score"], 8),
            ("c", ["re:.*proj", "re:.*mlp"], 3),
            ("d", [NAME, "score"], 4),
        ]
    }
    stored = make_format(format="mixed-precision", config_groups=groups)
    expected = {
        NAME: 4,
        "score": 4,
        "model.layers.1.mlp.up_proj": 3,
        "model.layers.1.mlp.down_proj": 3,
        "model.layers.1.self_attn.q_proj": 3,
        "scores": 8,
        "other": 2,
    }
    assert {module: stored.layout_of(module) for module in expected} == {
        module: PackQuantizedLayout(bits, 32, True) for module, bits in expected.items()
    }
    assert stored.layout_of("lm_head") is None
    assert stored.description == "compressed-tensors " + " + ".join(f"{bits}-bit group 32 symmetric" for bits in (2, 4, 3, 8))


def test_a_module_that_no_target_covers_is_unquantized() -> None:
    stored = make_format(group={"targets": ["re:.*mlp.*", "LlamaAttention"]})
    assert stored.layout_of(NAME) == PackQuantizedLayout(4, 128, True)
    assert stored.layout_of("model.layers.0.self_attn.q_proj") is None
