"""Two-layer random models of each family, built by transformers, and their checkpoints on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pagedcore.batch import InputBatch
from pagedcore.models.decoder import Decoder
from pagedcore.models.registry import load_model
from support.dense_attention import DenseAttention

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    reference: PreTrainedModel


def make_checkpoint(folder: Path, family: str, *, max_shard_size: str = "1GB", std: float = 0.2, **changes: Any) -> Checkpoint:
    """A random model of `family` in `folder`. Weights and biases are large enough that each of them moves the logits; those of wider
    models need a smaller deviation `std`, or attention sees one key alone."""
    settings: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config_class, model_class = CLASSES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**{**settings, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=std)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Checkpoint(folder, model)


def load(folder: Path, *, dtype: torch.dtype = torch.float32, max_model_len: int | None = None) -> Decoder:
    return load_model(folder, dtype=dtype, device=CPU, load_format="auto", seed=0, max_model_len=max_model_len)


def prompt_ids(length: int, vocab_size: int = 128) -> Tensor:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(length))


def run(decoder: Decoder, token_ids: Tensor, *, start: int = 0, attention: DenseAttention | None = None) -> Tensor:
    """Logits [T, V] of tokens that stand at positions start, start + 1, ..."""
    length = len(token_ids)
    batch = InputBatch(
        token_ids=token_ids,
        positions=torch.arange(start, start + length),
        attention=attention or DenseAttention(),
        logits_indices=torch.arange(length),
    )
    with torch.inference_mode():
        return decoder.forward(batch)


def reference_logits(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(token_ids[None]).logits[0]
