"""Turns a Llama GGUF file with a byte-level BPE tokenizer into a Hugging Face folder, with numpy and tokenizers alone.

Weights are stored in fp16: a 4 or 8 bit value times an fp16 scale is kept to 2^-11 of itself, eight times closer than bf16
would, in half the bytes of fp32. `config.json` still names bfloat16, the type that the model was trained in and computes in on GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedcore.errors import CheckpointError
from pagedcore.models.gguf_file import Floats, GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL_TOKEN = 3

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_llama_gguf(source: Path, folder: Path, on_tensor: Callable[[int], None]) -> None:
    """Write config, tokenizer and weights of `source` into `folder`; `on_tensor` gets the number of tensors done.

    Raises `CheckpointError` for a file of another kind.
    """
    gguf = GgufFile(source)
    meta = gguf.metadata
    kind = (meta.get("general.architecture"), meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        raise CheckpointError(f"{source} is {kind}; ('llama', 'gpt2', 'smollm') can be converted.")
    _write_json(folder / "config.json", _config(gguf))
    _write_json(folder / "generation_config.json", _special_ids(meta))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(meta))
    _tokenizer(meta).save(str(folder / "tokenizer.json"), pretty=False)
    _write_weights(gguf, folder / "model.safetensors", on_tensor)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _special_ids(meta: dict[str, Any]) -> dict[str, int]:
    return {
        f"{name}_token_id": meta[f"tokenizer.ggml.{key}_token_id"] for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }


def _config(gguf: GgufFile) -> dict[str, Any]:
    meta = gguf.metadata
    heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.embedding_length"] // heads,
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": meta["llama.rope.freq_base"],
        "rms_norm_eps": _shortest(meta["llama.attention.layer_norm_rms_epsilon"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": "bfloat16",
        **_special_ids(meta),
    }


def _shortest(value: float) -> float:
    """The decimal that was meant: GGUF keeps 1e-5 as the fp32 nearest to it."""
    return float(str(np.float32(value)))


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    ids = {**_special_ids(meta), "unk_token_id": meta["tokenizer.ggml.unknown_token_id"]}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": meta.get("tokenizer.ggml.add_bos_token", False),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        **{name.removesuffix("_id"): tokens[token_id] for name, token_id in ids.items()},
        "chat_template": meta["tokenizer.chat_template"],
    }


def _tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE that first splits digits one by one (the "smollm" pre-tokenizer): without that, ids differ on numbers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _write_weights(gguf: GgufFile, path: Path, on_tensor: Callable[[int], None]) -> None:
    from safetensors.numpy import save_file

    weights = {}
    for done, name in enumerate(gguf.tensors, start=1):
        weights[_hf_name(name)] = _weight(gguf, name).astype(np.float16)
        on_tensor(done)
    save_file(weights, path, metadata={"format": "pt"})


def _hf_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def _weight(gguf: GgufFile, name: str) -> Floats:
    weight = gguf.read(name)
    if ".attn_q." in name:
        return _halves_together(weight, gguf.metadata["llama.attention.head_count"])
    if ".attn_k." in name:
        return _halves_together(weight, gguf.metadata["llama.attention.head_count_kv"])
    return weight


def _halves_together(weight: Floats, num_heads: int) -> Floats:
    """GGUF keeps the two rotary halves of a head interleaved (row 2i, 2i + 1); Hugging Face keeps them one after the other."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)
