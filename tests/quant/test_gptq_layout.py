"""GPTQ matrices in every layout are read bit by bit as written, and what a file says is held against what it contains."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedcore.errors import CheckpointError
from pagedcore.quant.gptq import GptqFormat
from pagedcore.quant.gptq_layout import GptqLayout
from pagedcore.quant.gptq_zeros import ZeroStorage, candidates, uniform_zeros, unpack_zeros
from support.gptq_writer import dequantize, pack, pack_matrix, write_gptq

BITS = [2, 3, 4, 8]
LABELS = {1: "gptq", 2: "gptq_v2"}
ORDERS = [(False, "present"), (False, "missing"), (False, "zero"), (True, "present")]
OUT, IN = 13, 256


def layout(**settings: Any) -> GptqLayout:
    return GptqFormat.from_settings({"bits": 4, "group_size": 32, "sym": True, **settings}, "config.json").layout


def random_weight(out_features: int = OUT, in_features: int = IN) -> Tensor:
    return torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(0)) * 0.02


def read_zeros(stored: int | list[int], *, out_features: int | None = None, bits: int = 4, name: str = "m", **settings: Any) -> list[int]:
    """Zero points of one group as read from the integers in qzeros: `stored` in each place, or these words."""
    words = stored if isinstance(stored, list) else pack([stored] * 32, bits)
    count = out_features or 32 * len(words) // bits
    tensors = {
        f"{name}.qweight": torch.zeros((bits, count), dtype=torch.int32),
        f"{name}.qzeros": torch.tensor([words], dtype=torch.int64).to(torch.int32),
        f"{name}.scales": torch.ones(1, count),
    }
    return layout(bits=bits, **settings).unpack(name, 32, count, tensors).zeros.flatten().tolist()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [-1, 16, 32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_each_layout_is_read_exactly(bits: int, group_size: int, symmetric: bool, version: int, caplog: pytest.LogCaptureFixture) -> None:
    for act_order, g_idx in ORDERS:
        tensors: dict[str, Tensor] = {}
        expected = write_gptq(
            tensors,
            "m",
            random_weight(),
            bits=bits,
            group_size=group_size,
            symmetric=symmetric,
            version=version,
            act_order=act_order,
            g_idx=g_idx,
        )
        stored = layout(bits=bits, group_size=group_size, sym=symmetric, format=LABELS[version], desc_act=act_order)
        assert {name: spec.shape for name, spec in stored.declare("m", IN, OUT, tensors.keys()).items()} == {
            name: tensor.shape for name, tensor in tensors.items()
        }
        matrix = stored.unpack("m", IN, OUT, tensors)
        assert torch.equal(matrix.dequantize(torch.float32), expected)
        assert (matrix.group_of_input is not None) == (act_order and group_size != -1)
    assert not caplog.records


@given(bits=st.sampled_from(BITS), size=st.integers(1, 9), groups=st.integers(1, 4), outs=st.integers(1, 40), seed=st.integers(0, 99))
def test_sizes_that_fill_no_word_and_every_zero_point_are_read_exactly(bits: int, size: int, groups: int, outs: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    codes, zeros = draw.integers(0, 2**bits, (outs, groups * size)), draw.integers(0, 2**bits, (outs, groups))
    scales = draw.uniform(0.001, 0.1, (outs, groups)).astype(np.float16)
    group_of_input = draw.permutation(np.arange(groups * size) // size)
    for version, label in LABELS.items():
        stored = pack_matrix(codes, zeros, scales, bits=bits, version=version) | {"g_idx": torch.from_numpy(group_of_input)}
        tensors = {f"m.{suffix}": tensor for suffix, tensor in stored.items()}
        matrix = layout(bits=bits, group_size=size, sym=False, format=label).unpack("m", groups * size, outs, tensors)
        assert torch.equal(matrix.codes, torch.from_numpy(codes))
        assert torch.equal(matrix.zeros, torch.from_numpy(zeros))
        assert torch.equal(matrix.dequantize(torch.float32), dequantize(codes, zeros, scales, group_of_input))


@pytest.mark.parametrize(
    ("bits", "words", "v1", "v2"),
    [
        (2, [0x55555555], [2] * 16, [1] * 16),
        (2, [0x8F8F8F8F], [0, 1, 2, 3] * 4, [3, 3, 0, 2] * 4),
        (3, [0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D], [4] * 32, [3] * 32),
        (3, [0x47D63447, 0x3447D634, 0xD63447D6], [0, 1, 2, 3, 4, 5, 6, 7] * 4, [7, 0, 1, 2, 3, 4, 5, 6] * 4),
        (4, [0x77777777], [8] * 8, [7] * 8),
        (4, [0x654320FF], [0, 1, 2, 3, 4, 5, 6, 7], [15, 15, 0, 2, 3, 4, 5, 6]),
        (8, [0x7F7F7F7F], [128] * 4, [127] * 4),
        (8, [0x0200FFFF], [0, 1, 2, 3], [255, 255, 0, 2]),
    ],
)
def test_known_zero_points(bits: int, words: list[int], v1: list[int], v2: list[int]) -> None:
    """Also one of 0, which in version 1 borrowed from its neighbours, except with 3 bits."""
    assert read_zeros(words, bits=bits, sym=False) == v1
    assert read_zeros(words, bits=bits, sym=False, format="gptq_v2") == v2


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, None])
@pytest.mark.parametrize(("label", "stored_minus"), [("gptq", 0), ("gptq_v2", 1)])
def test_symmetric_zero_points_that_contradict_the_label_are_read_by_content(
    bits: int, symmetric: bool | None, label: str, stored_minus: int, caplog: pytest.LogCaptureFixture
) -> None:
    middle = 2 ** (bits - 1)
    assert set(read_zeros(middle - stored_minus, bits=bits, sym=symmetric, format=label, name="layers.0.up")) == {middle}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "pagedcore.quant.gptq_layout"
    names = {"gptq": "gptq (zero minus one)", "gptq_v2": "gptq_v2 (the zero itself)"}
    other = next(name for name in names if name != label)
    assert record.getMessage() == (
        f"layers.0.up.qzeros: config.json labels the zero points {names[label]}, and they are those of a symmetric model "
        f"stored as {names[other]}: they are read so, here and in the layers like it."
    )


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("label", "stored_minus"), [("gptq", 1), ("gptq_v2", 0), (None, 1)])
def test_symmetric_zero_points_that_agree_with_the_label_are_no_news(
    bits: int, label: str | None, stored_minus: int, caplog: pytest.LogCaptureFixture
) -> None:
    for symmetric in (True, None):
        assert set(read_zeros(2 ** (bits - 1) - stored_minus, bits=bits, sym=symmetric, format=label)) == {2 ** (bits - 1)}
    assert not caplog.records


@pytest.mark.parametrize("bits", BITS)
def test_an_asymmetric_file_follows_its_label_whatever_it_holds(bits: int, caplog: pytest.LogCaptureFixture) -> None:
    middle = 2 ** (bits - 1)
    assert set(read_zeros(middle, bits=bits, sym=False)) == {middle + 1}
    assert set(read_zeros(middle - 1, bits=bits, sym=False, format="gptq_v2")) == {middle - 1}
    assert not caplog.records


def test_a_file_that_does_not_say_whether_it_is_symmetric_follows_its_label_otherwise() -> None:
    assert read_zeros([0x76543210], sym=None) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert read_zeros([0x76543210], sym=None, checkpoint_format="gptq_v2") == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("words", "label", "found"),
    [
        ([0x44444444], "gptq", "5"),
        ([0x99999999], "gptq_v2", "9"),
        ([0x77777767], "gptq", "from 7 to 8"),
        ([0x88888887], "gptq", "from 8 to 9"),
    ],
)
def test_zero_points_that_no_symmetric_model_has_are_refused(words: list[int], label: str, found: str) -> None:
    stored = {"gptq": "gptq (zero minus one)", "gptq_v2": "gptq_v2 (the zero itself)"}[label]
    with pytest.raises(CheckpointError) as caught:
        read_zeros(words, name="layers.3.down", format=label)
    assert str(caught.value) == (
        f"layers.3.down.qzeros: config.json says that the model is symmetric and stored as {stored}, which makes each 4-bit zero point 8; "
        f"they are {found}, and no storage known makes them 8. If the model is asymmetric, set sym to false in config.json."
    )


@pytest.mark.parametrize("padding", [0x00000, 0xFFFFF, 0xEEEEF, 0x13579])
@pytest.mark.parametrize(("label", "stored"), [("gptq", 0x777), ("gptq_v2", 0x888)])
def test_bits_beyond_the_last_output_say_nothing(padding: int, label: str, stored: int, caplog: pytest.LogCaptureFixture) -> None:
    assert read_zeros([padding << 12 | stored], out_features=3, format=label) == [8, 8, 8]
    assert not caplog.records


# Words of 32 fours are 24924924 49249249 92492492; GPTQModel before 7.0 took 24924924 92492492 49249249 from them.
OLD_3_BIT = [0x00000000, 0xB6DB6DB7, 0x49249249]
OLD_META = {"quantizer": ["gptqmodel:5.6.0"]}


def test_old_symmetric_3_bit_files_are_read_by_content(caplog: pytest.LogCaptureFixture) -> None:
    assert read_zeros(OLD_3_BIT, bits=3) == [4] * 32
    assert "stored as 3-bit gptq as GPTQModel before 7.0 wrote it" in caplog.text


@pytest.mark.parametrize("meta", [OLD_META, {"quantizer": "gptqmodel:1.4.2"}, {"quantizer": ["optimum:1.2", "gptqmodel:6.0.3-dev"]}])
@pytest.mark.parametrize("symmetric", [True, False, None])
def test_old_3_bit_files_that_name_their_writer_are_read_as_it_wrote_them(
    meta: dict[str, Any], symmetric: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_zeros(OLD_3_BIT, bits=3, sym=symmetric, meta=meta) == [4] * 32
    assert not caplog.records


def test_all_zero_points_of_old_3_bit_files_come_back() -> None:
    zeros = [0, 1, 2, 3, 4, 5, 6, 7] * 4
    taken = [0x24924924, 0x92492492, 0x49249249]
    words = [(word - less) % (1 << 32) for word, less in zip(pack(zeros, 3), taken, strict=True)]
    assert read_zeros(words, bits=3, sym=False, meta=OLD_META) == zeros


@pytest.mark.parametrize(
    ("bits", "settings"),
    [
        (3, {"meta": {"quantizer": ["gptqmodel:7.0.0"]}}),
        (3, {"meta": {"quantizer": "autogptq:0.7.1"}}),
        (3, {"meta": None}),
        (4, {"meta": OLD_META}),
    ],
)
def test_other_writers_stored_zero_minus_one(bits: int, settings: dict[str, Any]) -> None:
    assert set(read_zeros(2, bits=bits, sym=False, **settings)) == {3}
    assert layout(bits=bits, **settings).zero_storage is ZeroStorage.MINUS_ONE


def test_old_writers_stored_version_2_as_it_is() -> None:
    assert set(read_zeros(2, bits=3, sym=False, format="gptq_v2", meta=OLD_META)) == {2}


@pytest.mark.parametrize(("bits", "storage"), [(bits, storage) for bits in BITS for storage in candidates(ZeroStorage.AS_IS, bits)])
def test_uniform_zeros_are_what_is_read(bits: int, storage: ZeroStorage) -> None:
    for zero in range(1, 2**bits):
        words = uniform_zeros(zero, bits, 7, storage, torch.device("cpu"))
        assert words.shape == (7,)
        assert set(unpack_zeros(words[None], bits, 7 * 32 // bits, storage).flatten().tolist()) == {zero}


@pytest.mark.parametrize(("group", "size"), [(-1, 16), (4, 16), (1, -1)])
def test_a_group_that_does_not_exist_is_refused(group: int, size: int) -> None:
    tensors: dict[str, Tensor] = {}
    write_gptq(tensors, "layers.0.q", random_weight(8, 64), group_size=size)
    tensors["layers.0.q.g_idx"][5] = group
    with pytest.raises(CheckpointError) as caught:
        layout(group_size=size).unpack("layers.0.q", 64, 8, tensors)
    num_groups = 4 if size == 16 else 1
    assert str(caught.value) == (
        f"layers.0.q.g_idx names group {group}, and the matrix has {num_groups} groups, numbered from 0 "
        f"(in_features 64, group_size {size} in config.json)."
    )


@pytest.mark.parametrize(("g_idx", "fact"), [("missing", "there is none"), ("zero", "it is all zero")])
def test_act_order_without_groups_is_told_once_and_read_in_order(g_idx: Any, fact: str, caplog: pytest.LogCaptureFixture) -> None:
    stored = layout(desc_act=True)
    for name in ("layers.0.q", "layers.1.q"):
        tensors: dict[str, Tensor] = {}
        expected = write_gptq(tensors, name, random_weight(), g_idx=g_idx)
        assert torch.equal(stored.unpack(name, IN, OUT, tensors).dequantize(torch.float32), expected)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"layers.0.q.g_idx: config.json says desc_act, which needs the group of each input, and {fact}: "
        "each 32 inputs in order are read as one group, here and in the layers like it."
    )


@pytest.mark.parametrize("g_idx", ["missing", "zero"])
def test_one_group_needs_no_order(g_idx: Any, caplog: pytest.LogCaptureFixture) -> None:
    tensors: dict[str, Tensor] = {}
    write_gptq(tensors, "m", random_weight(), group_size=-1, g_idx=g_idx)
    assert layout(group_size=-1, desc_act=True).unpack("m", IN, OUT, tensors).group_of_input is None
    assert not caplog.records


def test_an_order_in_the_file_counts_even_if_desc_act_is_false() -> None:
    tensors: dict[str, Tensor] = {}
    expected = write_gptq(tensors, "m", random_weight(), act_order=True)
    assert torch.equal(layout(desc_act=False).unpack("m", IN, OUT, tensors).dequantize(torch.float32), expected)


def test_bfloat16_and_float32_scales_keep_their_floats() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        tensors: dict[str, Tensor] = {}
        write_gptq(tensors, "m", random_weight())
        tensors["m.scales"] = scales = (tensors["m.scales"].float() * 1.01).to(dtype)
        matrix = layout().unpack("m", IN, OUT, tensors)
        assert matrix.scales.dtype == torch.float32
        assert torch.equal(matrix.scales, scales.float().T)


def test_what_is_declared() -> None:
    specs = layout(bits=3, group_size=20).declare("a.q", 60, 33, {"a.q.qweight", "a.q.g_idx"})
    assert {name: (spec.shape, spec.dtype, spec.reason) for name, spec in specs.items()} == {
        "a.q.qweight": ((6, 33), torch.int32, "gptq 3-bit group 20"),
        "a.q.qzeros": ((3, 4), torch.int32, "gptq 3-bit group 20"),
        "a.q.scales": ((3, 33), torch.float32, "gptq 3-bit group 20"),
        "a.q.g_idx": ((60,), torch.int32, "gptq 3-bit group 20"),
    }


def test_g_idx_is_declared_if_it_is_there_or_dummies_need_it() -> None:
    assert "m.g_idx" not in layout(desc_act=True).declare("m", 64, 8, {"m.qweight"})
    assert "m.g_idx" in layout(desc_act=False).declare("m", 64, 8, {"m.g_idx"})
    assert "m.g_idx" in layout(desc_act=True).declare("m", 64, 8, None)
    assert "m.g_idx" not in layout(desc_act=False).declare("m", 64, 8, None)


def test_a_group_size_that_does_not_divide_the_inputs_is_refused_with_layer_and_sizes() -> None:
    for call in (
        lambda stored: stored.declare("layers.0.down", 200, 96, None),
        lambda stored: stored.unpack("layers.0.down", 200, 96, {}),
    ):
        with pytest.raises(CheckpointError, match=r"layers\.0\.down has 200 inputs and 96 outputs.* group_size 128 does not divide"):
            call(layout(group_size=128))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False, None])
@pytest.mark.parametrize("settings", [{}, {"format": "gptq_v2"}, {"meta": OLD_META}])
def test_dummies_are_as_large_as_real_weights(
    bits: int, symmetric: bool | None, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    stored = layout(bits=bits, sym=symmetric, desc_act=True, **settings)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, spec in stored.declare("m", IN, 100, None).items():
        assert spec.dummy is not None
        tensors[name] = spec.dummy(generator)
        assert (tensors[name].shape, tensors[name].dtype) == (spec.shape, spec.dtype)
    matrix = stored.unpack("m", IN, 100, tensors)
    assert matrix.dequantize(torch.float32).std().item() == pytest.approx(0.02, rel=0.05)
    assert (set(matrix.zeros.flatten().tolist()) == {2 ** (bits - 1)}) == (symmetric is not False)
    assert matrix.group_of_input is not None
    assert torch.equal(matrix.group_of_input.bincount(), torch.full((8,), 32))
    assert not caplog.records
