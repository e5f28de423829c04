"""Model shapes with random weights, and prompts of fixed seeds: the same token ids for every engine that is measured."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

_COMMON = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 40960,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA_7B = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm", "modules_to_not_convert": ["lm_head"]}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "llama2-7b": _LLAMA_7B,
    "qwen2.5-7b": {
        **_COMMON,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    },
    "llama2-7b-gptq": {**_LLAMA_7B, "torch_dtype": "float16", "quantization_config": _GPTQ},
    "llama2-7b-gptq-act-order": {**_LLAMA_7B, "torch_dtype": "float16", "quantization_config": _GPTQ | {"desc_act": True}},
    "llama2-7b-awq": {**_LLAMA_7B, "torch_dtype": "float16", "quantization_config": _AWQ},
}


def write_shape(name: str, folder: Path) -> Path:
    """A model folder that holds config.json alone."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(SHAPES[name]))
    return target


def mixed_lengths(num_prompts: int = 256, low: int = 100, high: int = 1024) -> tuple[list[list[int]], list[int]]:
    """W1: prompts and output lengths, both uniform in [low, high]."""
    draw = random.Random(0)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(low, high))] for _ in range(num_prompts)]
    return prompts, [draw.randint(low, high) for _ in range(num_prompts)]


def equal_prompts(batch: int, salt: int, length: int = 128) -> list[list[int]]:
    """W2: `batch` prompts of one length."""
    draw = random.Random(1000 * batch + salt)
    return [[draw.randint(0, 10000) for _ in range(length)] for _ in range(batch)]


def shared_prefix(num_prompts: int = 256, prefix: int = 2048, suffix: int = 64, salt: int = 0) -> list[list[int]]:
    """W3: one prefix, a suffix of each prompt's own."""
    draw = random.Random(77 + salt)
    shared = [draw.randint(0, 10000) for _ in range(prefix)]
    return [shared + [draw.randint(0, 10000) for _ in range(suffix)] for _ in range(num_prompts)]


def long_prompts(count: int, salt: int, length: int = 32000) -> list[list[int]]:
    """W4: long contexts."""
    draw = random.Random(5000 + 100 * count + salt)
    return [[draw.randint(0, 10000) for _ in range(length)] for _ in range(count)]
