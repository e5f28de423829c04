"""The arithmetic of `pagedcore doctor`, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedcore.commands.advice import EMBEDDED_SHAPE, GIB, ModelShape, advise, read_shape
from pagedcore.commands.machine import Device, read_machine, version_of

pytestmark = pytest.mark.needs_torch

LLAMA_7B = ModelShape(name="7b", num_parameters=6_738_415_616, kv_elements_per_token=32 * 2 * 32 * 128, max_model_len=4096)


def card(total_gib: float, free_gib: float | None = None) -> Device:
    free = total_gib if free_gib is None else free_gib
    return Device(kind="cuda", name="card", total_bytes=int(total_gib * GIB), free_bytes=int(free * GIB), compute_capability="9.0")


def cpu(free_gib: float) -> Device:
    return Device(kind="cpu", name="cpu", total_bytes=int(free_gib * GIB), free_bytes=int(free_gib * GIB))


def test_a_card_is_filled_with_typical_requests_up_to_the_default_limit() -> None:
    # 0.9 x 24 - 12.55 GiB of weights leave 9.05 GiB; a request of 1,024 tokens takes 0.5 GiB: 18 fit.
    advice = advise(card(24), LLAMA_7B, element_bytes=2)
    assert (advice.block_size, advice.max_num_seqs) == (16, 16)
    assert "512.0 KiB a token that is 18 requests of 1,024 tokens" in advice.reasons[1]
    assert advise(card(141), LLAMA_7B, element_bytes=2).max_num_seqs == 128
    assert advise(card(400), LLAMA_7B, element_bytes=2).max_num_seqs == 256


def test_memory_that_others_hold_is_not_given_away() -> None:
    assert advise(card(24, free_gib=20), LLAMA_7B, element_bytes=2).max_num_seqs == 8


def test_a_card_that_is_too_small_is_told_so() -> None:
    advice = advise(card(8), LLAMA_7B, element_bytes=2)
    assert advice.max_num_seqs == 1
    assert "Not one such request fits" in advice.reasons[1]


@pytest.mark.parametrize(("free_gib", "expected"), [(100, 64), (4, 8), (0.1, 1)])
def test_a_cpu_has_two_gib_or_a_tenth_of_what_is_free(free_gib: float, expected: int) -> None:
    # 45 KiB a token in fp32, 45 MiB a request: 2 GiB hold 45 of them, 0.4 GiB 9.
    expected = min(expected, 32)
    assert advise(cpu(free_gib), EMBEDDED_SHAPE, element_bytes=4).max_num_seqs == expected


@pytest.mark.parametrize(("max_model_len", "block_size"), [(65_536, 16), (65_537, 32), (131_072, 32), (1_048_576, 256), (10_000_000, 256)])
def test_longer_contexts_get_larger_blocks(max_model_len: int, block_size: int) -> None:
    shape = ModelShape(name="long", num_parameters=1, kv_elements_per_token=1, max_model_len=max_model_len)
    assert advise(card(1), shape, element_bytes=2).block_size == block_size


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
