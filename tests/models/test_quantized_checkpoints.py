"""A quantized checkpoint gives the logits of the dense model that it stands for, whatever its layout, and says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagedcore.errors import CheckpointError, ConfigError
from pagedcore.models.decoder import Decoder
from pagedcore.models.registry import load_model
from pagedcore.quant import quantized_linear
from support.quantized_checkpoints import WEIGHTS, StoredAs, awq, compressed_tensors, gptq, is_projection, make_pair
from support.tiny_models import CPU, load, prompt_ids, run

Q_PROJ = "model.layers.0.self_attn.q_proj"
V_PROJ = "model.layers.1.self_attn.v_proj"

LAYOUTS = {
    "gptq 4": gptq(),
    "gptq 2": gptq(bits=2),
    "gptq 3": gptq(bits=3, group_size=32),
    "gptq 8": gptq(bits=8),
    "gptq one group": gptq(group_size=-1),
    "gptq v2": gptq(version=2),
    "gptq asymmetric": gptq(symmetric=False),
    "gptq asymmetric v2": gptq(symmetric=False, version=2),
    "gptq act-order": gptq(act_order=True),
    "gptq act-order asymmetric": gptq(act_order=True, symmetric=False),
    "awq gemm": awq(),
    "awq gemv": awq(version="gemv"),
    "awq without zero points": awq(zero_point=False),
    "compressed-tensors W4A16": compressed_tensors(),
    "compressed-tensors W4A16 asymmetric": compressed_tensors(symmetric=False),
    "compressed-tensors W4A16 unpacked zero points": compressed_tensors(symmetric=False, packed_zero_points=False),
    "compressed-tensors W4A16 act-order": compressed_tensors(act_order=True),
    "compressed-tensors W8A16": compressed_tensors(bits=8, group_size=-1),
    "compressed-tensors W8A16 group": compressed_tensors(bits=8, group_size=32),
}


def assert_same_logits(packed: Path, dense: Path, dtype: torch.dtype = torch.float32, *, atol: float = 1e-4) -> Decoder:
    decoder = load(packed, dtype=dtype)
    logits = run(decoder, prompt_ids(11)).float()
    assert logits.std() > 0.1
    torch.testing.assert_close(logits, run(load(dense, dtype=dtype), prompt_ids(11)).float(), atol=atol, rtol=0.0)
    return decoder


def rewrite_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_equal_the_dense_model(name: str, family: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, LAYOUTS[name], family)
    decoder = assert_same_logits(pair.packed, pair.dense)
    assert decoder.linear_backend == "dequantized"
    assert decoder.num_weight_bytes == load(pair.dense).num_weight_bytes


@pytest.mark.parametrize("name", ["gptq 4", "gptq act-order", "awq gemm", "compressed-tensors W4A16 asymmetric"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_may_be_of_either_half_precision(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Weights are rounded once, from their float32 values, as the dense model's are."""
    pair = make_pair(tmp_path, LAYOUTS[name])
    assert_same_logits(pair.packed, pair.dense, dtype, atol=0.0)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("name", ["gptq 4", "compressed-tensors W8A16"])
def test_heads_load_tied_or_not_and_quantized_or_not(is_tied: bool, is_quantized: bool, name: str, tmp_path: Path) -> None:
    """A quantized head in a file whose config ties it to the embedding is the head; the embedding stays as it is."""
    pair = make_pair(tmp_path, LAYOUTS[name], packs=lambda module: is_projection(module) or (is_quantized and module == "lm_head"))
    embedding = load_file(pair.packed / WEIGHTS)["model.embed_tokens.weight"]
    if is_tied:
        rewrite_config(pair.packed, tie_word_embeddings=True)
        if not is_quantized:
            pair.edit(lambda tensors: tensors.pop("lm_head.weight"))
            dense = load_file(pair.dense / WEIGHTS) | {"lm_head.weight": embedding.clone()}
            save_file(dense, pair.dense / WEIGHTS)
    decoder = assert_same_logits(pair.packed, pair.dense)
    assert decoder.has_tied_head is (is_tied and not is_quantized)


def test_a_packed_head_is_read_whether_the_config_speaks_of_it_or_not(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, gptq(), packs=lambda module: is_projection(module) or module == "lm_head")
    pair.configure(lm_head=False)
    assert_same_logits(pair.packed, pair.dense)


def test_modules_that_the_file_holds_plain_are_plain_whatever_the_rules_say(tmp_path: Path) -> None:
    plain = ("0.self_attn.k_proj", "1.mlp.up_proj")
    pair = make_pair(tmp_path, awq(), packs=lambda module: is_projection(module) and not module.endswith(plain))
    assert_same_logits(pair.packed, pair.dense)


@pytest.mark.parametrize("stored", [gptq(), awq()], ids=["gptq", "awq"])
def test_modules_left_in_16_bit_by_rule_load_beside_packed_ones(stored: StoredAs, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, stored, packs=lambda module: is_projection(module) and "layers.0.self_attn" not in module)
    pair.configure(modules_to_not_convert=["model.layers.0.self_attn", "lm_head"])
    assert_same_logits(pair.packed, pair.dense)


def test_a_packed_module_that_a_rule_leaves_out_is_refused(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, gptq())
    pair.configure(dynamic={r"-:.*layers\.1\.self_attn\.v_proj": {}})
    with pytest.raises(CheckpointError, match=rf"holds {V_PROJ}\.qweight, and its quantization config leaves {V_PROJ} unquantized"):
        load(pair.packed)


def test_a_module_with_both_forms_is_refused(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, gptq())
    pair.edit(lambda tensors: tensors.update({f"{Q_PROJ}.weight": torch.zeros(64, 64)}))
    with pytest.raises(CheckpointError, match=rf"both {Q_PROJ}\.qweight and {Q_PROJ}\.weight"):
        load(pair.packed)


def test_rules_for_some_modules_change_bits_and_groups_within_one_fused_product(tmp_path: Path) -> None:
    """q, k and v share one product here; v alone has 8 bits in groups of 32."""
    narrow, wide = gptq(), gptq(bits=8, group_size=32)

    def write(tensors: dict[str, Tensor], name: str, weight: Tensor) -> Tensor:
        return (wide if name.endswith("v_proj") else narrow).write(tensors, name, weight)

    rules = {r"-:.*lm_head": {}, r"+:.*\.v_proj": {"bits": 8, "group_size": 32}}
    pair = make_pair(tmp_path, StoredAs(write, narrow.settings | {"dynamic": rules}))
    assert_same_logits(pair.packed, pair.dense)


def test_parts_of_one_product_may_each_have_an_order_of_their_own(tmp_path: Path) -> None:
    stored = gptq(act_order=True)

    def write(tensors: dict[str, Tensor], name: str, weight: Tensor) -> Tensor:
        return stored.write(tensors, name, weight, seed=sum(name.encode()))  # type: ignore[call-arg]

    pair = make_pair(tmp_path, StoredAs(write, stored.settings))
    orders = load_file(pair.packed / WEIGHTS)
    assert not torch.equal(orders[f"{Q_PROJ}.g_idx"], orders[f"{Q_PROJ.replace('q_proj', 'k_proj')}.g_idx"])
    assert_same_logits(pair.packed, pair.dense)


@pytest.mark.parametrize(
    ("stored", "plain"),
    [
        (gptq(act_order=True, group_size=32), "none"),
        (gptq(act_order=True, group_size=32, symmetric=False), "gate_proj"),
        (gptq(act_order=True, group_size=32), "down_proj"),
        (compressed_tensors(act_order=True, group_size=32), "none"),
    ],
    ids=["all packed", "a dense gate", "a plain down", "compressed-tensors"],
)
@pytest.mark.parametrize("packs_head", [False, True])
def test_packed_products_find_their_inputs_in_their_order(
    stored: StoredAs, plain: str, packs_head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device with kernels for packed weights: what comes before a product gives its result in the order of the product's groups."""
    monkeypatch.setattr(quantized_linear, "is_packed_on", lambda device, dtype: True)

    def packs(module: str) -> bool:
        return (is_projection(module) and not module.endswith(plain)) or (packs_head and module == "lm_head")

    pair = make_pair(tmp_path, stored, packs=packs)
    decoder = assert_same_logits(pair.packed, pair.dense, atol=1e-3)
    assert "triton-w4a16" in decoder.linear_backend


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_biases_that_the_model_class_does_not_have_are_added(value: float, tmp_path: Path) -> None:
    """GPTQ tools have written one for every packed matrix, mostly of zeros."""
    pair = make_pair(tmp_path, gptq())
    without = run(load(pair.packed), prompt_ids(11))
    pair.edit(lambda tensors: tensors.update({f"{V_PROJ}.bias": torch.full((16,), value)}))
    logits = run(load(pair.packed), prompt_ids(11))
    assert torch.equal(logits, without) is (value == 0.0)
    if value:
        config = json.loads((pair.dense / "config.json").read_text())
        (pair.dense / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
        dense = load_file(pair.dense / WEIGHTS)
        for name in [name for name in dense if "self_attn" in name]:
            dense[name.replace(".weight", ".bias")] = torch.zeros(len(dense[name]))
        save_file(dense | {f"{V_PROJ}.bias": torch.full((16,), value)}, pair.dense / WEIGHTS)
        assert_same_logits(pair.packed, pair.dense)


@pytest.mark.parametrize("file_name", ["quantize_config.json", "quant_config.json"])
def test_settings_may_lie_in_a_file_beside_config_json(file_name: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, {"quantize_config.json": gptq(), "quant_config.json": awq()}[file_name])
    config = json.loads((pair.packed / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (pair.packed / "config.json").write_text(json.dumps(config))
    (pair.packed / file_name).write_text(json.dumps(settings))
    assert_same_logits(pair.packed, pair.dense)


@pytest.mark.parametrize("has_index", [False, True])
def test_packed_tensors_may_lie_in_any_shard(has_index: bool, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, gptq(act_order=True))
    tensors = load_file(pair.packed / WEIGHTS)
    (pair.packed / WEIGHTS).unlink()
    shards: list[dict[str, Tensor]] = [{}, {}, {}]
    weight_map = {}
    for index, name in enumerate(sorted(tensors)):
        shards[index % 3][name] = tensors[name]
        weight_map[name] = f"model-{index % 3 + 1:05}-of-00003.safetensors"
    for number, shard in enumerate(shards, start=1):
        save_file(shard, pair.packed / f"model-{number:05}-of-00003.safetensors")
    if has_index:
        (pair.packed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same_logits(pair.packed, pair.dense)


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales"])
def test_a_missing_packed_tensor_is_named(suffix: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, gptq())
    pair.edit(lambda tensors: tensors.pop(f"{Q_PROJ}.{suffix}"))
    with pytest.raises(CheckpointError, match=rf"lacks {Q_PROJ}\.{suffix}"):
        load(pair.packed)


def test_an_extra_tensor_of_a_packed_module_is_named(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, awq())
    pair.edit(lambda tensors: tensors.update({f"{Q_PROJ}.g_idx": torch.zeros(64, dtype=torch.int32)}))
    with pytest.raises(CheckpointError, match=rf"holds {Q_PROJ}\.g_idx"):
        load(pair.packed)


def test_bits_that_the_file_does_not_have_are_an_error_with_layer_and_shapes(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, gptq())
    pair.configure(bits=8)
    with pytest.raises(CheckpointError, match=r"q_proj\.qweight in .* has shape \[8, 64\] and must have \[16, 64\] by .*8-bit"):
        load(pair.packed)


def test_a_group_size_that_the_file_does_not_have_is_an_error_with_layer_and_shapes(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, compressed_tensors())
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    pair.configure(config_groups={"group_0": {"targets": ["Linear"], "weights": weights}})
    with pytest.raises(CheckpointError, match=r"weight_scale in .* has shape \[64, 4\] and must have \[64, 2\]"):
        load(pair.packed)


@pytest.mark.parametrize("stored", [gptq(), awq(), compressed_tensors()], ids=["gptq", "awq", "compressed-tensors"])
def test_inputs_that_groups_do_not_divide_are_an_error_with_layer_and_sizes(stored: StoredAs, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, stored)
    if "config_groups" in stored.settings:
        weights = stored.settings["config_groups"]["group_0"]["weights"]
        pair.configure(config_groups={"group_0": {"targets": ["Linear"], "weights": {**weights, "group_size": 48}}})
    else:
        pair.configure(group_size=48)
    with pytest.raises(CheckpointError, match=r"q_proj.*64.*48"):
        load(pair.packed)


def test_packed_integers_that_are_floats_are_refused(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, gptq())
    pair.edit(lambda tensors: tensors.update({f"{Q_PROJ}.qweight": torch.zeros(8, 64)}))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}\.qweight in .* is of torch\.float32; int32, int64 are"):
        load(pair.packed)


def load_as(folder: Path, quantization: str) -> Decoder:
    return load_model(folder, dtype=torch.float32, device=CPU, load_format="auto", seed=0, max_model_len=None, quantization=quantization)


def test_the_quantization_setting_is_held_against_the_checkpoint(tmp_path: Path) -> None:
    """Which names mean which format is a matter of `tests/quant`."""
    pair = make_pair(tmp_path, gptq())
    assert load_as(pair.packed, "gptq_marlin").linear_backend == "dequantized"
    with pytest.raises(ConfigError, match=r"quantization is 'awq' and the checkpoint in .* says 'gptq'.*leave quantization unset"):
        load_as(pair.packed, "awq")
    with pytest.raises(ConfigError, match=r"quantization is 'gptq' and the checkpoint in .* says that it is not quantized"):
        load_as(pair.dense, "gptq")


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_weights_need_config_json_alone_and_look_like_a_model(name: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, LAYOUTS[name])
    (pair.packed / WEIGHTS).unlink()

    def dummy(seed: int) -> Tensor:
        decoder = load_model(pair.packed, dtype=torch.float32, device=CPU, load_format="dummy", seed=seed, max_model_len=None)
        assert decoder.linear_backend == "dequantized"
        return run(decoder, prompt_ids(9))

    logits = dummy(0)
    assert logits.isfinite().all()
    assert 0.005 < logits.std() < 5.0
    assert torch.equal(dummy(0), logits)
    assert not torch.equal(dummy(1), logits)
