"""GGUF files: what is read equals what the gguf package reads, and the folder made of one is the same model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from pagedcore.errors import CheckpointError
from pagedcore.models.gguf_convert import convert_llama_gguf
from pagedcore.models.gguf_file import GgufFile
from pagedcore.text.tokenizer import load_tokenizer
from support.small_gguf import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, TEMPLATE, TOKENS, write_gguf


def convert(tmp_path: Path, *, tied: bool = True) -> tuple[Path, dict[str, np.ndarray]]:
    tensors = write_gguf(tmp_path / "model.gguf", tied=tied)
    folder = tmp_path / "folder"
    folder.mkdir()
    convert_llama_gguf(tmp_path / "model.gguf", folder, lambda done: None)
    return folder, tensors


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_read_as_the_gguf_package_reads_it(tmp_path: Path, tied: bool) -> None:
    tensors = write_gguf(tmp_path / "model.gguf", tied=tied)
    gguf = GgufFile(tmp_path / "model.gguf")
    assert set(gguf.tensors) == set(tensors)
    for name, expected in tensors.items():
        np.testing.assert_array_equal(gguf.read(name), expected, err_msg=name)


def test_metadata_is_read(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    meta = GgufFile(tmp_path / "model.gguf").metadata
    assert meta["general.architecture"] == "llama"
    assert meta["llama.embedding_length"] == HIDDEN
    assert meta["tokenizer.ggml.tokens"] == TOKENS
    assert meta["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]


@pytest.mark.parametrize(("keep", "message"), [(3, "header"), (100, "header"), (-100, "cut short")])
def test_a_file_that_is_cut_short_says_so(tmp_path: Path, keep: int, message: str) -> None:
    path = tmp_path / "model.gguf"
    last = list(write_gguf(path))[-1]
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=message):
        GgufFile(path).read(last)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        GgufFile(path)


def test_a_model_with_another_pre_tokenizer_is_not_converted_to_a_wrong_one(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", pre="llama-bpe")
    with pytest.raises(CheckpointError, match="llama-bpe"):
        convert_llama_gguf(tmp_path / "model.gguf", tmp_path, lambda done: None)


def test_weights_are_stored_to_the_precision_of_fp16(tmp_path: Path) -> None:
    folder, tensors = convert(tmp_path)
    weights = load_file(folder / "model.safetensors")
    assert len(weights) == len(tensors)
    stored = weights["model.layers.1.mlp.down_proj.weight"]
    assert stored.dtype == np.float16
    np.testing.assert_allclose(stored, tensors["blk.1.ffn_down.weight"], rtol=2**-11, atol=1e-7)


@pytest.mark.parametrize(("part", "num_heads"), [("q", HEADS), ("k", KV_HEADS)])
def test_rotary_halves_are_moved_together(tmp_path: Path, part: str, num_heads: int) -> None:
    """Row 2i + j of a head in the GGUF file is row i + j * head_dim / 2 of the head."""
    folder, tensors = convert(tmp_path)
    stored = load_file(folder / "model.safetensors")[f"model.layers.0.self_attn.{part}_proj.weight"]
    source = tensors[f"blk.0.attn_{part}.weight"].astype(np.float16)
    for head in range(num_heads):
        for row in range(HEAD_DIM):
            target = head * HEAD_DIM + row // 2 + (row % 2) * HEAD_DIM // 2
            np.testing.assert_array_equal(stored[target], source[head * HEAD_DIM + row])


@pytest.mark.parametrize("tied", [True, False])
def test_the_configuration_is_that_of_the_file(tmp_path: Path, tied: bool) -> None:
    folder, _ = convert(tmp_path, tied=tied)
    config = json.loads((folder / "config.json").read_text())
    expected = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    assert {key: config[key] for key in expected} == expected
    assert (config["rope_theta"], config["rms_norm_eps"]) == (50_000.0, 1e-5)
    assert config["tie_word_embeddings"] is tied
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_tokenizer_splits_digits_even_where_a_merge_would_join_them(tmp_path: Path) -> None:
    folder, _ = convert(tmp_path)
    tokenizer = load_tokenizer(folder)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("hi12")] == ["hi", "1", "2"]
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id] == [2]
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "x" != TEMPLATE


@pytest.mark.slow
def test_transformers_reads_the_folder_as_the_same_model(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder, _ = convert(tmp_path)
    ours = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    ids = load_tokenizer(folder).encode("hi 12 é")
    assert tokenizer("hi 12 é")["input_ids"] == ids
    # Before there was a GgufConfig, GGUF weights were always dequantized.
    options = {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file="model.gguf", dtype=torch.float32, **options)
    batch = torch.tensor([ids])
    with torch.no_grad():
        torch.testing.assert_close(ours(batch).logits, theirs(batch).logits, rtol=0.01, atol=0.01)
