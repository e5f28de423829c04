"""Logits equal transformers' on the same weights, for each family and each switch that changes the arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.dense_attention import DenseAttention
from support.tiny_models import load, make_checkpoint, prompt_ids, reference_logits, run

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 6e-2}
LENGTH = 23

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-one-query-head-a-kv-head": ("llama", {"num_key_value_heads": 6}),
    "llama-five-query-heads-a-kv-head": ("llama", {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "llama-heads-wider-than-hidden": ("llama", {"head_dim": 16}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-window-longer-than-the-prompt": ("mistral", {"sliding_window": 40}),
    "mistral-head-dim": ("mistral", {"head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-of-upper-layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2-window-by-layer-types": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen2-window-switched-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3-head-dim": ("qwen3", {"head_dim": 32}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_whole_prompt_equal_the_references(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    checkpoint = make_checkpoint(tmp_path, family, **changes)
    token_ids = prompt_ids(LENGTH)
    expected = reference_logits(checkpoint.reference, token_ids)
    torch.testing.assert_close(run(load(tmp_path), token_ids), expected, atol=TOLERANCE[torch.float32], rtol=0.0)


@pytest.mark.parametrize("case", ["llama", "mistral-window", "qwen2-window-of-upper-layers", "qwen3-window"])
def test_chunks_and_single_steps_give_the_logits_of_the_whole_prompt(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    checkpoint = make_checkpoint(tmp_path, family, **changes)
    token_ids = prompt_ids(LENGTH)
    expected = reference_logits(checkpoint.reference, token_ids)
    decoder, attention, done = load(tmp_path), DenseAttention(), 0
    for size in (5, 1, 1, 9, 1, 1, 1, 1, 1, 1, 1):
        logits = run(decoder, token_ids[done : done + size], start=done, attention=attention)
        torch.testing.assert_close(logits, expected[done : done + size], atol=TOLERANCE[torch.float32], rtol=0.0)
        done += size
    assert done == LENGTH


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_logits_stay_near_the_float32_ones(family: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, family)
    token_ids = prompt_ids(LENGTH)
    expected = reference_logits(checkpoint.reference, token_ids)
    logits = run(load(tmp_path, dtype=torch.bfloat16), token_ids)
    assert logits.dtype == torch.bfloat16
    error = (logits.float() - expected).norm() / expected.norm()
    assert error < TOLERANCE[torch.bfloat16]


def test_only_the_wanted_tokens_get_logits(tmp_path: Path) -> None:
    from pagedcore.batch import InputBatch

    make_checkpoint(tmp_path, "llama")
    decoder, token_ids = load(tmp_path), prompt_ids(LENGTH)
    whole = run(decoder, token_ids)
    for wanted in ([LENGTH - 1], [3, 9, 9, 0], []):
        indices = torch.tensor(wanted, dtype=torch.int64)
        batch = InputBatch(token_ids=token_ids, positions=torch.arange(LENGTH), attention=DenseAttention(), logits_indices=indices)
        logits = decoder.forward(batch)
        assert logits.shape == (len(wanted), decoder.vocab_size)
        torch.testing.assert_close(logits, whole[indices], atol=1e-5, rtol=0.0)


def test_a_forward_pass_leaves_the_weights_as_they_are(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    decoder, token_ids = load(tmp_path), prompt_ids(LENGTH)
    assert torch.equal(run(decoder, token_ids), run(decoder, token_ids))
