"""AWQ: both orders of nibbles against hand-made words and an independent packer, and what the config may say."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedcore.errors import CheckpointError
from pagedcore.quant.awq import AwqFormat
from pagedcore.quant.awq_layout import AwqGemmLayout, AwqGemvLayout
from pagedcore.quant.checkpoint_format import CheckpointFormat, PackedLayout
from pagedcore.quant.quantized_matrix import QuantizedMatrix
from support.awq_writer import INTERLEAVED, pack_rows, write_awq

NAME = "model.layers.0.mlp.up_proj"
WHERE = "quantization_config of /m/config.json"
LAYOUTS: dict[str, Callable[..., PackedLayout]] = {"gemm": AwqGemmLayout, "gemv": AwqGemvLayout}


def read(layout: PackedLayout, tensors: dict[str, Tensor], out_features: int, in_features: int) -> QuantizedMatrix:
    """Unpack what the layout declares, cast as a loader casts it."""
    specs = layout.declare(NAME, in_features, out_features, tensors)
    assert {name: spec.shape for name, spec in specs.items()} == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return layout.unpack(NAME, in_features, out_features, {name: tensors[name].to(spec.dtype) for name, spec in specs.items()})


def make_format(**settings: Any) -> AwqFormat:
    return AwqFormat.from_settings({"quant_method": "awq", **settings}, WHERE)


def words(*values: int) -> Tensor:
    return torch.tensor([value - 2**32 if value >= 2**31 else value for value in values], dtype=torch.int32)


def test_a_gemm_word_interleaves_its_eight_columns() -> None:
    tensors = {
        f"{NAME}.qweight": words(0x75316420, 0x8ACE9BDF)[:, None],  # two inputs, eight outputs: 0 to 7, and 15 to 8
        f"{NAME}.qzeros": words(0xFDB9ECA8)[:, None],  # 8 to 15
        f"{NAME}.scales": torch.full((1, 8), 0.5),
    }
    matrix = read(AwqGemmLayout(None), tensors, 8, 2)
    assert matrix.codes.T.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [15, 14, 13, 12, 11, 10, 9, 8]]
    assert matrix.zeros.T.tolist() == [[8, 9, 10, 11, 12, 13, 14, 15]]
    assert matrix.dequantize(torch.float32).T.tolist() == [[-4.0] * 8, [3.5, 2.5, 1.5, 0.5, -0.5, -1.5, -2.5, -3.5]]


def test_a_gemv_word_holds_its_inputs_and_groups_in_order() -> None:
    tensors = {
        f"{NAME}.qweight": words(0x76543210, 0xFEDCBA98).repeat(16)[None],  # 256 inputs of one output: 0 to 15, again and again
        f"{NAME}.qzeros": words(0x01234567, 0, 0, 0)[None],  # eight groups of 32 inputs: 7 to 0
        f"{NAME}.scales": torch.cat([torch.arange(1.0, 9.0), torch.zeros(24)])[None],
    }
    matrix = read(AwqGemvLayout(32), tensors, 1, 256)
    assert matrix.codes.tolist() == [list(range(16)) * 16]
    assert matrix.zeros.tolist() == [[7, 6, 5, 4, 3, 2, 1, 0]]
    dense = matrix.dequantize(torch.float32)
    assert [dense[0, 0].item(), dense[0, 31].item(), dense[0, 32].item(), dense[0, 255].item()] == [-7.0, 8.0, -12.0, 120.0]


@pytest.mark.parametrize("zero_point", [True, False])
@pytest.mark.parametrize(("in_features", "group_size"), [(64, 32), (192, 64), (256, 128), (128, -1), (1088, 64), (320, 32)])
@pytest.mark.parametrize("out_features", [8, 24, 13])
@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_a_stored_matrix_is_read_bit_for_bit(version: str, out_features: int, in_features: int, group_size: int, zero_point: bool) -> None:
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(in_features)) * 0.02
    tensors: dict[str, Tensor] = {}
    expected = write_awq(tensors, NAME, weight, group_size=group_size, version=version, zero_point=zero_point)
    layout = make_format(version=version, group_size=group_size, zero_point=zero_point).layout_of(NAME)
    assert layout is not None
    matrix = read(layout, tensors, out_features, in_features)
    assert matrix.num_groups == (1 if group_size == -1 else in_features // group_size)
    assert torch.equal(matrix.dequantize(torch.float32), expected)
    assert (expected - weight).abs().max() < 0.01


@pytest.mark.parametrize(("in_features", "group_size"), [(60, 15), (48, 16), (7, -1)])
def test_gemm_takes_any_group_size_that_divides(in_features: int, group_size: int) -> None:
    weight, tensors = torch.randn(5, in_features, generator=torch.Generator().manual_seed(0)), dict[str, Tensor]()
    expected = write_awq(tensors, NAME, weight, group_size=group_size)
    matrix = read(AwqGemmLayout(None if group_size == -1 else group_size), tensors, 5, in_features)
    assert torch.equal(matrix.dequantize(torch.float32), expected)


@given(
    st.integers(1, 20).flatmap(lambda width: st.lists(st.lists(st.integers(0, 15), min_size=width, max_size=width), min_size=1, max_size=4))
)
def test_every_code_comes_back_from_its_interleaved_nibble(rows: list[list[int]]) -> None:
    out_features = len(rows[0])
    tensors = {f"{NAME}.qweight": pack_rows(rows, INTERLEAVED), f"{NAME}.scales": torch.ones(1, out_features)}
    assert read(AwqGemmLayout(None, has_zeros=False), tensors, out_features, len(rows)).codes.T.tolist() == rows


@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_filling_beyond_the_matrix_is_never_read(version: str) -> None:
    tensors: dict[str, Tensor] = {}
    expected = write_awq(tensors, NAME, torch.randn(13, 96, generator=torch.Generator().manual_seed(0)), group_size=32, version=version)
    if version == "gemm":
        for suffix in ("qweight", "qzeros"):
            tensors[f"{NAME}.{suffix}"][:, -1] |= words(0xFF00F000)  # columns 13, 14 and 15 would be in nibbles 6, 3 and 7
    else:
        tensors[f"{NAME}.qzeros"][:, 1:] = -1
        tensors[f"{NAME}.scales"][:, 3:] = float("nan")
    assert torch.equal(read(LAYOUTS[version](32), tensors, 13, 96).dequantize(torch.float32), expected)


def test_stored_zeros_are_followed_whatever_zero_point_says() -> None:
    tensors: dict[str, Tensor] = {}
    expected = write_awq(tensors, NAME, torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) + 0.5, group_size=32)
    assert torch.equal(read(AwqGemmLayout(32, has_zeros=False), tensors, 8, 64).dequantize(torch.float32), expected)


@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_a_matrix_without_zeros_has_the_middle_for_zero(version: str) -> None:
    layout = LAYOUTS[version](32, has_zeros=False)
    assert f"{NAME}.qzeros" not in layout.declare(NAME, 64, 8, {f"{NAME}.qweight", f"{NAME}.scales"})
    tensors: dict[str, Tensor] = {}
    write_awq(tensors, NAME, torch.ones(8, 64), group_size=32, version=version, zero_point=False)
    assert read(layout, tensors, 8, 64).zeros.tolist() == [[8, 8]] * 8


def test_zeros_are_asked_for_where_the_config_has_them() -> None:
    specs = AwqGemmLayout(128).declare(NAME, 256, 24, present=())
    assert {name: (spec.shape, spec.dtype) for name, spec in specs.items()} == {
        f"{NAME}.qweight": ((256, 3), torch.int32),
        f"{NAME}.qzeros": ((2, 3), torch.int32),
        f"{NAME}.scales": ((2, 24), torch.float32),
    }
    assert {spec.reason for spec in specs.values()} == {"awq 4-bit group 128 gemm"}


@pytest.mark.parametrize(
    ("in_features", "group_size", "num_words"),
    [
        (4096, 128, 4),
        (1024, 128, 1),
        (11008, 128, 11),
        (1152, 128, 2),
        (4096, 64, 8),
        (64, 64, 2),
        (1088, 64, 4),
        (32, 32, 4),
        (1056, 32, 8),
    ],
)
def test_gemv_rows_of_zeros_are_padded_as_its_kernels_want(in_features: int, group_size: int, num_words: int) -> None:
    specs = AwqGemvLayout(group_size).declare(NAME, in_features, 16, None)
    assert specs[f"{NAME}.qweight"].shape == (16, in_features // 8)
    assert specs[f"{NAME}.qzeros"].shape == (16, num_words)
    assert specs[f"{NAME}.scales"].shape == (16, num_words * 8)


@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_inputs_that_the_group_size_does_not_divide_are_refused_by_name_and_size(version: str) -> None:
    for use in ("declare", "unpack"):
        with pytest.raises(
            CheckpointError, match=rf"{re.escape(NAME)} has 576 inputs and 192 outputs, .*group_size 128 does not divide 576; quantize"
        ):
            getattr(LAYOUTS[version](128), use)(NAME, 576, 192, {})


@pytest.mark.parametrize(("group_size", "in_features"), [(16, 64), (96, 192), (None, 48)])
def test_gemv_is_refused_in_groups_that_its_kernels_never_had(group_size: int | None, in_features: int) -> None:
    with pytest.raises(
        CheckpointError, match=f"{NAME} is stored as awq gemv in groups of {group_size or in_features} inputs.*gemm version"
    ):
        AwqGemvLayout(group_size).declare(NAME, in_features, 8, None)


@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_random_weights_are_as_large_as_real_ones(version: str, has_zeros: bool) -> None:
    layout = LAYOUTS[version](32, has_zeros=has_zeros)
    specs = layout.declare(NAME, 512, 264, None)
    drawn = {name: spec.dummy(torch.Generator().manual_seed(1)) for name, spec in specs.items() if spec.dummy is not None}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in drawn.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in specs.items()
    }
    matrix = layout.unpack(NAME, 512, 264, drawn)
    assert matrix.dequantize(torch.float32).std().item() == pytest.approx(0.02, rel=0.05)
    assert (matrix.codes.flatten().bincount() > 0).tolist() == [True] * 16


@pytest.mark.parametrize(
    ("settings", "description", "layout"),
    [
        ({"bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, "awq 4-bit group 64 gemm", AwqGemmLayout(64)),
        ({"w_bit": 4, "q_group_size": 128, "version": "GEMM"}, "awq 4-bit group 128 gemm", AwqGemmLayout(128)),
        ({"w_bit": 4, "q_group_size": -1, "version": "GEMV", "zero_point": False}, "awq 4-bit channel gemv", AwqGemvLayout(None, False)),
        ({}, "awq 4-bit group 128 gemm", AwqGemmLayout(128)),
        (
            {"format": "gemm", "checkpoint_format": "gemm", "version": "GEMM", "bits": 4, "w_bit": 4},
            "awq 4-bit group 128 gemm",
            AwqGemmLayout(128),
        ),
        (
            {"method": "awq", "sym": False, "desc_act": False, "pack_dtype": "int32", "meta": {"damp_percent": None}, "version": None},
            "awq 4-bit group 128 gemm",
            AwqGemmLayout(128),
        ),
    ],
)
def test_the_keys_of_every_writer_are_understood(settings: dict[str, Any], description: str, layout: PackedLayout) -> None:
    stored: CheckpointFormat = make_format(**settings)
    assert (stored.method, stored.packed_suffix, stored.description) == ("awq", "qweight", description)
    assert stored.layout_of(NAME) == stored.default_layout() == layout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 8}, "bits is 8 in {}, and awq is covered with 4 bits."),
        ({"w_bit": 3}, "w_bit is 3 in {}, and awq is covered with 4 bits."),
        ({"bits": "4"}, "bits is '4' in {}, and must be a whole number."),
        ({"bits": True}, "bits is True in {}, and must be a whole number."),
        ({"bits": 4, "w_bit": 8}, "w_bit is 8 in {}, and bits, which means the same, is 4."),
        ({"group_size": 0}, "group_size is 0 in {}, and must be positive, or -1 for one group of all inputs."),
        ({"q_group_size": -2}, "q_group_size is -2 in {}, and must be positive, or -1 for one group of all inputs."),
        ({"group_size": 64.0}, "group_size is 64.0 in {}, and must be a whole number."),
        ({"zero_point": "yes"}, "zero_point is 'yes' in {}, and must be true or false."),
        ({"version": "gemv_fast"}, "version is 'gemv_fast' in {}, and is not covered; gemm and gemv are."),
        ({"version": "Marlin"}, "version is 'Marlin' in {}, and is not covered; gemm and gemv are."),
        ({"format": "llm-awq"}, "format is 'llm-awq' in {}, and is not covered; gemm and gemv are."),
        ({"checkpoint_format": "exllama"}, "checkpoint_format is 'exllama' in {}, and is not covered; gemm and gemv are."),
        ({"version": 3}, "version is 3 in {}, and is not covered; gemm and gemv are."),
        ({"version": "gemm", "format": "gemv"}, "format is 'gemv' in {}, and version, which means the same, is 'gemm'."),
        ({"backend": "llm-awq"}, "backend is 'llm-awq' in {}, and its packing is not covered; that of autoawq is."),
        ({"desc_act": True}, "desc_act is True in {}, and awq has no act-order."),
        ({"sym": 1}, "sym is 1 in {}, and must be true or false."),
        ({"method": "gptq"}, "quant_method is 'awq' in {}, and method, which means the same, is 'gptq'."),
        ({"pack_dtype": "int16"}, "pack_dtype is 'int16' in {}, and is not covered; int32 is."),
        ({"lm_head": "no"}, "lm_head is 'no' in {}, and must be true or false."),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head' in {}, and must be a list of texts."),
        ({"modules_to_not_convert": [1]}, "modules_to_not_convert is [1] in {}, and must be a list of texts."),
        ({"dynamic": {"+:.*": {"bits": 8}}}, "dynamic .*: bits is 8 in {}, and awq is covered with 4 bits."),
        ({"dynamic": {".*": {"version": "marlin"}}}, "dynamic .*: version is 'marlin' in {}, and is not covered; gemm and gemv are."),
    ],
)
def test_what_is_malformed_or_not_covered_is_refused_with_key_value_and_file(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        make_format(**settings)
    assert str(refused.value) == message.format(WHERE)


@pytest.mark.parametrize("dynamic", [[], "x", {"[": {}}, {"up": 3}])
def test_malformed_dynamic_rules_are_refused_with_the_file(dynamic: object) -> None:
    with pytest.raises(CheckpointError, match=re.escape(WHERE)):
        make_format(dynamic=dynamic)


@pytest.mark.parametrize(
    ("rules", "module", "is_packed"),
    [
        (None, NAME, True),
        (["mlp"], NAME, False),
        (["layers.0"], NAME, False),
        ([NAME], NAME, False),
        (["up_proj"], NAME, False),
        (["up"], NAME, True),
        (["model.layers.1"], "model.layers.10.mlp.up_proj", True),
        (["gate"], "model.layers.0.mlp.gate_proj", True),
        (["layers.0.up_proj"], NAME, True),
        (None, "lm_head", False),
    ],
)
def test_modules_to_not_convert_are_whole_components_of_the_name(rules: list[str] | None, module: str, is_packed: bool) -> None:
    assert (make_format(modules_to_not_convert=rules).layout_of(module) is not None) is is_packed


def test_a_head_is_packed_only_if_the_config_says_so() -> None:
    assert make_format(lm_head=True).layout_of("lm_head") == AwqGemmLayout(128)
    assert make_format(lm_head=True, modules_to_not_convert=["lm_head"]).layout_of("lm_head") is None
    assert make_format(lm_head=False).layout_of("lm_head") is None


def test_the_first_dynamic_rule_that_matches_the_name_from_its_start_decides() -> None:
    rules = {
        r"-:.*\.0\.mlp\.down": {},
        r"+:.*\.0\.mlp": {"group_size": 32, "mse": 2.4},
        r".*mlp": {"group_size": 64, "zero_point": False},
        r"mlp": {"group_size": 16},
    }
    stored = make_format(dynamic=rules, q_group_size=128)
    layouts = [
        stored.layout_of(f"model.layers.{end}") for end in ("0.mlp.down_proj", "0.mlp.up_proj", "1.mlp.up_proj", "1.self_attn.q_proj")
    ]
    assert layouts == [None, AwqGemmLayout(32), AwqGemmLayout(64, False), AwqGemmLayout(128)]
