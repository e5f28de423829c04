"""The arithmetic of `pagedcore doctor`, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedcore.commands.machine import Device, read_machine
from pagedcore.commands.recommendation import EMBEDDED_SHAPE, GIB, ModelShape, read_shape, recommend
from pagedcore.extras import version_of

pytestmark = pytest.mark.needs_torch

LLAMA_7B = ModelShape(name="7b", num_parameters=6_738_415_616, kv_elements_per_token=32 * 2 * 32 * 128, max_model_len=4096)


def card(total_gib: float, free_gib: float | None = None) -> Device:
    free = total_gib if free_gib is None else free_gib
    return Device(kind="cuda", name="card", total_bytes=int(total_gib * GIB), free_bytes=int(free * GIB), compute_capability="9.0")


def cpu(free_gib: float) -> Device:
    return Device(kind="cpu", name="cpu", total_bytes=int(free_gib * GIB), free_bytes=int(free_gib * GIB))


def test_a_card_is_filled_with_typical_requests_up_to_the_default_limit() -> None:
    # 0.9 x 24 - 12.55 GiB of weights leave 9.05 GiB; a request of 1,024 tokens takes 0.5 GiB: 18 fit.
    found = recommend(card(24), LLAMA_7B, element_bytes=2)
    assert (found.block_size, found.max_num_seqs) == (16, 16)
    assert "512.0 KiB a token that is 18 requests of 1,024 tokens" in found.reasons[1]
    assert recommend(card(141), LLAMA_7B, element_bytes=2).max_num_seqs == 128
    assert recommend(card(400), LLAMA_7B, element_bytes=2).max_num_seqs == 256


def test_memory_that_others_hold_is_not_given_away() -> None:
    assert recommend(card(24, free_gib=20), LLAMA_7B, element_bytes=2).max_num_seqs == 8


def test_a_card_that_is_too_small_is_told_so() -> None:
    found = recommend(card(8), LLAMA_7B, element_bytes=2)
    assert found.max_num_seqs == 1
    assert "Not one such request fits" in found.reasons[1]


@pytest.mark.parametrize(("free_gib", "expected"), [(100, 64), (4, 8), (0.1, 1)])
def test_a_cpu_has_two_gib_or_a_tenth_of_what_is_free(free_gib: float, expected: int) -> None:
    # 45 KiB a token in fp32, 45 MiB a request: 2 GiB hold 45 of them, 0.4 GiB 9.
    expected = min(expected, 32)
    assert recommend(cpu(free_gib), EMBEDDED_SHAPE, element_bytes=4).max_num_seqs == expected


@pytest.mark.parametrize(("max_model_len", "block_size"), [(65_536, 16), (65_537, 32), (131_072, 32), (1_048_576, 256), (10_000_000, 256)])
def test_longer_contexts_get_larger_blocks(max_model_len: int, block_size: int) -> None:
    shape = ModelShape(name="long", num_parameters=1, kv_elements_per_token=1, max_model_len=max_model_len)
    assert recommend(card(1), shape, element_bytes=2).block_size == block_size


def test_the_embedded_shape_is_what_its_config_says(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path)
    assert shape.num_parameters == EMBEDDED_SHAPE.num_parameters
    assert shape.kv_elements_per_token == EMBEDDED_SHAPE.kv_elements_per_token


def test_facts_about_this_machine_are_plausible() -> None:
    machine = read_machine()
    assert 0 < machine.host_free_bytes <= machine.host_total_bytes
    assert machine.num_cpus >= 1
    assert machine.devices
    assert machine.packages["torch"] == version_of("torch")
    assert version_of("no-such-distribution") is None


def quantized_7b(folder: Path, **settings: object) -> ModelShape:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
        "quantization_config": {"quant_method": "gptq", "group_size": 128, "desc_act": False, "sym": True, **settings},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(folder)


@pytest.mark.parametrize(
    ("settings", "weights", "cache"),
    [
        ({"bits": 4}, "3.69", "17.9"),
        ({"bits": 8}, "6.71", "14.9"),
        ({"bits": 4, "group_size": -1}, "3.50", "18.1"),
        ({"bits": 3}, "12.55", "9.0"),
        ({"bits": 4, "group_size": 16}, "12.55", "9.0"),
    ],
)
def test_weights_that_kernels_read_packed_leave_a_card_more_memory(
    settings: dict[str, object], weights: str, cache: str, tmp_path: Path
) -> None:
    # 32 layers of 202.4 M parameters, at 1/2 byte + 4/128; embeddings and head, 262 M, at 2 bytes.
    found = recommend(card(24), quantized_7b(tmp_path, **settings), element_bytes=2)
    assert f"about {weights} GiB" in found.reasons[2]
    assert ("as they are packed" in found.reasons[2]) == (weights != "12.55")
    assert f"{cache} GiB for KV blocks" in found.reasons[1]


def test_weights_are_dequantized_on_a_cpu_and_on_old_cards(tmp_path: Path) -> None:
    shape = quantized_7b(tmp_path, bits=4)
    old = Device(kind="cuda", name="card", total_bytes=24 * GIB, free_bytes=24 * GIB, compute_capability="7.5")
    assert "16-bit floats, about 12.55 GiB" in recommend(old, shape, element_bytes=2).reasons[2]
    assert "32-bit floats, about 25.10 GiB" in recommend(cpu(100), shape, element_bytes=4).reasons[2]
