"""Weights come from safetensors alone, every tensor is accounted for, and dummy weights are as asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagedcore.batch import KVLayout
from pagedcore.errors import CheckpointError
from pagedcore.models.checkpoint import SafetensorsSource
from pagedcore.models.registry import load_model
from pagedcore.quant import TensorSpec, linear
from support.tiny_models import CPU, load, make_checkpoint, prompt_ids, reference_logits, run

WEIGHTS = "model.safetensors"
Edit = Callable[[dict[str, Tensor]], None]


def rewrite(folder: Path, edit: Edit) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def load_dummy(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    decoder = load_model(folder, dtype=dtype, device=CPU, load_format="dummy", seed=seed, max_model_len=None)
    return run(decoder, prompt_ids(9))


def test_a_decoder_says_what_its_cache_and_vocabulary_are(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    decoder = load(tmp_path)
    assert decoder.kv_layout == KVLayout(num_layers=2, num_kv_heads=2, head_dim=8)
    assert decoder.vocab_size == 128
    assert decoder.max_model_len == 64
    assert load(tmp_path, max_model_len=17).max_model_len == 17


def test_shards_give_the_logits_of_the_whole(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    token_ids = prompt_ids(12)
    torch.testing.assert_close(run(load(tmp_path), token_ids), reference_logits(checkpoint.reference, token_ids), atol=2e-4, rtol=0.0)


def test_what_goes_to_a_gpu_has_its_type_before(tmp_path: Path) -> None:
    """So that the device never holds a matrix in two types, and no more bytes travel than stay."""
    make_checkpoint(tmp_path, "llama")
    uploaded: list[torch.dtype] = []

    def upload(tensor: Tensor) -> Tensor:
        uploaded.append(tensor.dtype)
        return tensor.clone()

    with SafetensorsSource(tmp_path, torch.bfloat16, CPU) as source:
        source._upload = upload
        tensor = source.read("model.norm.weight", TensorSpec((48,)))
    assert uploaded == [tensor.dtype] == [torch.bfloat16]
    assert torch.equal(tensor, load_file(tmp_path / WEIGHTS)["model.norm.weight"].bfloat16())


def test_shards_without_an_index_are_found_by_their_headers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    with_index = run(load(tmp_path), prompt_ids(12))
    (tmp_path / "model.safetensors.index.json").unlink()
    assert torch.equal(run(load(tmp_path), prompt_ids(12)), with_index)


def test_two_files_with_the_same_tensor_and_no_index_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / WEIGHTS).read_bytes())
    with pytest.raises(CheckpointError, match=r"copy\.safetensors and model\.safetensors"):
        load(tmp_path)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        load(tmp_path)


def test_an_index_that_promises_what_a_shard_lacks_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shards = sorted(set(content["weight_map"].values()))
    content["weight_map"]["model.norm.weight"] = next(s for s in shards if s != content["weight_map"]["model.norm.weight"])
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"holds model\.norm\.weight, and it does not"):
        load(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {"model.norm.weight": "../outside.safetensors"}])
def test_an_index_that_is_no_map_to_files_beside_it_is_refused(tmp_path: Path, weight_map: object) -> None:
    make_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "family"), [("model.layers.1.self_attn.k_proj.weight", "llama"), ("model.layers.0.self_attn.q_norm.weight", "qwen3")]
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str, family: str) -> None:
    make_checkpoint(tmp_path, family)
    rewrite(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        load(tmp_path)


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(tmp_path)


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    before = run(load(tmp_path), prompt_ids(9))
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((4,), 9.0)}))
    assert torch.equal(run(load(tmp_path), prompt_ids(9)), before)


def test_the_head_of_a_tied_checkpoint_is_the_embedding_whether_it_is_there_or_not(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)
    before = run(load(tmp_path), prompt_ids(9))
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert torch.equal(run(load(tmp_path), prompt_ids(9)), before)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    """Which of the two is meant cannot be known: older tools tie them, newer ones do not."""
    make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(128, 48)}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight that differs from model\.embed_tokens\.weight.*tie_word_embeddings"):
        load(tmp_path)


@pytest.mark.parametrize("copies", [False, True])
def test_a_tied_head_counts_as_weight_only_where_it_is_a_copy(tmp_path: Path, copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    monkeypatch.setattr(linear, "packing_pays", lambda weight: False)
    if copies:
        monkeypatch.setattr(linear.UnquantizedLinear, "holds", lambda self, weight: False)
    stored = sum(tensor.nbytes for tensor in load_file(tmp_path / WEIGHTS).values())
    assert load(tmp_path).num_weight_bytes == stored + (128 * 48 * 4 if copies else 0)


def test_an_untied_checkpoint_needs_its_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight in .* has shape \[47\] and must have \[48\]"):
        load(tmp_path)


def test_a_tensor_of_integers_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight in .* is of torch\.int8"):
        load(tmp_path)


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    path = tmp_path / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path, "llama")
    (tmp_path / WEIGHTS).unlink()
    (tmp_path / name).write_bytes(b"not even a pickle")
    with pytest.raises(CheckpointError, match=rf"pickle files \({name}\).*convert them to safetensors"):
        load(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        load(tmp_path)


def test_weights_outlive_their_files(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    decoder = load(tmp_path)
    before = run(decoder, prompt_ids(9))
    with (tmp_path / WEIGHTS).open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\xff" * 4096)
    assert torch.equal(run(decoder, prompt_ids(9)), before)


def test_progress_counts_bytes_up_to_the_whole(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    seen: list[tuple[int, int]] = []
    decoder = load_model(
        tmp_path,
        dtype=torch.float32,
        device=CPU,
        load_format="safetensors",
        seed=0,
        max_model_len=None,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1] == ((tmp_path / WEIGHTS).stat().st_size,) * 2
    assert seen[-2][0] == decoder.num_weight_bytes


def test_dummy_weights_need_config_json_alone_and_follow_the_seed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    (tmp_path / WEIGHTS).unlink()
    logits = load_dummy(tmp_path)
    assert logits.std() > 0
    assert torch.equal(load_dummy(tmp_path), logits)
    assert not torch.equal(load_dummy(tmp_path, seed=1), logits)


def test_dummy_weights_have_the_configs_spread(tmp_path: Path) -> None:
    from pagedcore.models.checkpoint import DummySource
    from pagedcore.models.decoder import Decoder
    from pagedcore.models.registry import read_architecture

    make_checkpoint(tmp_path, "llama", initializer_range=0.05)
    source = DummySource(Decoder(read_architecture(tmp_path), dtype=torch.bfloat16, device=CPU, max_model_len=8), seed=3)
    drawn = source.read("lm_head.weight", TensorSpec((300, 300)))
    assert drawn.dtype == torch.bfloat16
    assert drawn.float().std().item() == pytest.approx(0.05, rel=0.05)
    assert not torch.equal(drawn, source.read("model.embed_tokens.weight", TensorSpec((300, 300))))
    assert torch.equal(source.read("model.norm.weight", TensorSpec((48,))), torch.ones(48, dtype=torch.bfloat16))
