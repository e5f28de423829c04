"""What would load as another model than the file means is an error with the tensor's name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pagedcore.errors import CheckpointError
from support.quantized_checkpoints import WEIGHTS, Pair, awq, compressed_tensors, gptq, make_pair
from support.tiny_models import load, prompt_ids, run

Q_PROJ = "model.layers.0.self_attn.q_proj"
STORED = {"gptq": gptq(), "gptq act-order": gptq(act_order=True), "awq": awq(), "awq gemv": awq(version="gemv"), "ct": compressed_tensors()}
SCALES = {"gptq": "scales", "awq": "scales", "awq gemv": "scales", "ct": "weight_scale"}
WORDS = {"gptq": "qweight", "awq": "qweight", "ct": "weight_packed"}


def change(pair: Pair, name: str, tensor: torch.Tensor) -> None:
    pair.edit(lambda tensors: tensors.update({name: tensor}))


def same_logits(pair: Pair) -> bool:
    return torch.allclose(run(load(pair.packed), prompt_ids(9)), run(load(pair.dense), prompt_ids(9)), atol=1e-4)


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_scale_that_is_not_finite_is_refused(name: str, value: float, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, STORED[name])
    tensor = f"{Q_PROJ}.{SCALES[name]}"
    scales = load_file(pair.packed / WEIGHTS)[tensor]
    scales[0, 1] = value
    change(pair, tensor, scales)
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}\.{SCALES[name]} in .* holds scales that are infinite or not a number"):
        load(pair.packed)


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_integers_too_narrow_for_a_packed_word_are_refused(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The shape fits and most of the bits are gone."""
    pair = make_pair(tmp_path, STORED[name])
    tensor = f"{Q_PROJ}.{WORDS[name]}"
    change(pair, tensor, load_file(pair.packed / WEIGHTS)[tensor].to(dtype))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}\.{WORDS[name]} in .* is of {dtype}; int32, int64 are covered"):
        load(pair.packed)


@pytest.mark.parametrize("is_signed", [True, False])
def test_packed_words_may_be_held_in_64_bits(is_signed: bool, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, gptq())
    words = load_file(pair.packed / WEIGHTS)[f"{Q_PROJ}.qweight"].long()
    change(pair, f"{Q_PROJ}.qweight", words if is_signed else words & 0xFFFFFFFF)
    assert same_logits(pair)


@pytest.mark.parametrize(("name", "suffix"), [("gptq", "qweight"), ("gptq act-order", "g_idx")])
def test_integers_beyond_32_bits_are_refused_and_not_cut(name: str, suffix: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, STORED[name])
    change(pair, f"{Q_PROJ}.{suffix}", load_file(pair.packed / WEIGHTS)[f"{Q_PROJ}.{suffix}"].long() + (1 << 32))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}\.{suffix} in .* do not fit into 32 bits"):
        load(pair.packed)


def test_unpacked_zero_points_are_signed(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, compressed_tensors(symmetric=False, packed_zero_points=False))
    zeros = load_file(pair.packed / WEIGHTS)[f"{Q_PROJ}.weight_zero_point"]
    change(pair, f"{Q_PROJ}.weight_zero_point", zeros.abs().to(torch.uint8))
    with pytest.raises(CheckpointError, match=r"weight_zero_point in .* is of torch.uint8; int32, int64, int8 are covered"):
        load(pair.packed)


def shard(folder: Path, left_out_of_index: str) -> None:
    """One shard, and an index that forgets some of its tensors."""
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    names = [name for name in load_file(folder / "model-00001-of-00001.safetensors") if not name.endswith(left_out_of_index)]
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_tensors_that_the_index_forgot_are_read(tmp_path: Path) -> None:
    """Without g_idx an act-order model would be read in another order."""
    pair = make_pair(tmp_path, gptq(act_order=True))
    shard(pair.packed, "g_idx")
    assert same_logits(pair)


def test_a_tensor_in_a_shard_that_nothing_asks_for_is_named_though_the_index_forgot_it(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, gptq())
    change(pair, "model.layers.7.mlp.down_proj.weight", torch.zeros(2))
    shard(pair.packed, "7.mlp.down_proj.weight")
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.7\.mlp\.down_proj\.weight"):
        load(pair.packed)


@pytest.mark.parametrize(("name", "suffix"), [("gptq", "qweight"), ("ct", "weight_packed")])
def test_a_packed_file_whose_settings_are_lost_says_so(name: str, suffix: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, STORED[name])
    (pair.packed / "config.json").write_text((pair.dense / "config.json").read_text())
    with pytest.raises(CheckpointError, match=rf"lacks .*\.weight, .*It holds .*_proj\.{suffix}, and neither config\.json nor"):
        load(pair.packed)


def test_settings_for_a_file_that_holds_nothing_packed_are_refused(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, gptq())
    config = json.loads((pair.packed / "config.json").read_text())
    (pair.dense / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"says that it is gptq 4-bit group 16.* and holds no packed tensor \(\*\.qweight\)"):
        load(pair.dense)
