"""Rotary embeddings of each kind equal transformers', in frequencies, in the factor on them, and in a model's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagedcore.models.rope import RotaryTable, rope_frequencies
from pagedcore.models.rope_parameters import RopeParameters
from support.tiny_models import CPU, load, make_checkpoint, prompt_ids, reference_logits, run

HEAD_DIM = 16
LONG = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.5 * i for i in range(8)]}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 100000.0},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1000.0},
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.3},
    "yarn-betas": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-mscale": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn-no-truncation": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "truncate": False},
    "longrope": {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 64, **LONG},
    "longrope-attention-factor": {"rope_type": "longrope", "original_max_position_embeddings": 64, "attention_factor": 1.2, **LONG},
}


def reference_embedding(parameters: dict[str, Any]) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0, **parameters},
    )
    return LlamaRotaryEmbedding(config)


def our_parameters(parameters: dict[str, Any], max_position_embeddings: int = 64) -> RopeParameters:
    config = {"rope_parameters": parameters}
    return RopeParameters.from_config_dict(config, max_position_embeddings=max_position_embeddings, head_dim=HEAD_DIM)


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_factor_equal_the_references(kind: str) -> None:
    reference = reference_embedding(KINDS[kind])
    frequencies = rope_frequencies(our_parameters(KINDS[kind]), head_dim=HEAD_DIM, max_model_len=64)
    assert frequencies.inverse.dtype == torch.float32
    torch.testing.assert_close(frequencies.inverse, reference.inv_freq, rtol=1e-6, atol=0.0)
    assert frequencies.scaling == pytest.approx(reference.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_cosines_and_sines_of_any_positions_equal_the_references(kind: str) -> None:
    positions = torch.tensor([0, 63, 5, 5, 17])
    expected_cos, expected_sin = reference_embedding(KINDS[kind])(torch.zeros(1), positions[None])
    table = RotaryTable(our_parameters(KINDS[kind]), head_dim=HEAD_DIM, max_model_len=64, dtype=torch.float32, device=CPU)
    rotation = table.at(positions)
    for ours, expected in zip((rotation.cos, rotation.sin), (expected_cos, expected_sin), strict=True):
        assert ours.shape == (5, 1, HEAD_DIM // 2)
        torch.testing.assert_close(ours[:, 0], expected[0, :, : HEAD_DIM // 2], rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_kinds_that_follow_the_length_are_fixed_for_max_model_len(kind: str) -> None:
    reference = reference_embedding(KINDS[kind])
    reference(torch.zeros(1), torch.arange(100)[None])
    frequencies = rope_frequencies(our_parameters(KINDS[kind]), head_dim=HEAD_DIM, max_model_len=100)
    torch.testing.assert_close(frequencies.inverse, reference.inv_freq, rtol=1e-6, atol=0.0)
    short = rope_frequencies(our_parameters(KINDS[kind]), head_dim=HEAD_DIM, max_model_len=64)
    assert not torch.equal(short.inverse, frequencies.inverse)


@pytest.mark.parametrize("kind", KINDS)
def test_a_models_logits_equal_the_references(kind: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama", head_dim=HEAD_DIM, rope_parameters={"rope_theta": 10000.0, **KINDS[kind]})
    token_ids = prompt_ids(60)
    logits = run(load(tmp_path, max_model_len=64), token_ids)
    torch.testing.assert_close(logits, reference_logits(checkpoint.reference, token_ids), atol=2e-4, rtol=0.0)


def test_both_spellings_of_the_settings_mean_the_same() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    old = {"rope_theta": 1000.0, "rope_scaling": scaling}
    new = {"rope_parameters": {**scaling, "rope_type": "yarn", "rope_theta": 1000.0}}
    read = [RopeParameters.from_config_dict(config, max_position_embeddings=64, head_dim=HEAD_DIM) for config in (old, new)]
    assert read[0] == read[1]
    assert read[0].theta == 1000.0


def test_without_settings_theta_is_ten_thousand() -> None:
    assert RopeParameters.from_config_dict({}, max_position_embeddings=64, head_dim=HEAD_DIM).theta == 10000.0


def test_yarn_promises_the_scaled_length_and_others_their_configs() -> None:
    assert our_parameters(KINDS["yarn"]).max_sequence_tokens == 128
    assert our_parameters(KINDS["yarn"], max_position_embeddings=256).max_sequence_tokens == 256
    assert our_parameters(KINDS["llama3"]).max_sequence_tokens == 64
    assert our_parameters(KINDS["dynamic"]).max_sequence_tokens == 64


def test_the_table_ends_at_max_model_len() -> None:
    table = RotaryTable(our_parameters({}), head_dim=HEAD_DIM, max_model_len=10, dtype=torch.bfloat16, device=CPU)
    assert table.num_positions == 10
    assert table.at(torch.tensor([9])).cos.dtype == torch.bfloat16
    with pytest.raises(IndexError):
        table.at(torch.tensor([10]))
