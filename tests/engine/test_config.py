"""Settings: what is taken, in which spellings, and how what is wrong is named."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from pagedcore.async_engine import as_config
from pagedcore.config import EngineConfig
from pagedcore.engine_build import REMOTE_CODE_WARNING, build_engine
from pagedcore.errors import ConfigError, ModelSourceError, UnknownOptionError


@pytest.mark.parametrize(
    "bad",
    [
        {"device": "cuda:x"},
        {"device": "cuda:"},
        {"device": "cuda:-1"},
        {"device": "cpu:0"},
        {"device": "cudax"},
        {"device": 0},
        {"device": None},
        {"block_size": 12},
        {"block_size": 16.0},
        {"block_size": True},
        {"block_size": None},
        {"block_size": [16]},
        {"max_num_seqs": 0},
        {"max_num_seqs": True},
        {"max_num_seqs": 2.0},
        {"max_num_seqs": "256"},
        {"max_num_batched_tokens": 0},
        {"max_waiting_requests": 0},
        {"num_kv_blocks": -1},
        {"max_model_len": "4096"},
        {"max_model_len": 0},
        {"max_model_len": None},
        {"gpu_memory_utilization": math.nan},
        {"gpu_memory_utilization": 0},
        {"gpu_memory_utilization": 1.01},
        {"gpu_memory_utilization": "0.9"},
        {"gpu_memory_utilization": None},
        {"gpu_memory_utilization": True},
        {"watermark_fraction": 1.0},
        {"watermark_fraction": math.nan},
        {"max_batch_wait_ms": -1},
        {"max_batch_wait_ms": math.inf},
        {"max_batch_wait_ms": math.nan},
        {"swap_space": -1},
        {"swap_space": math.inf},
        {"swap_space": 1e308},
        {"swap_space": math.nan},
        {"seed": 1.5},
        {"seed": None},
        {"seed": True},
        {"overlap": 1},
        {"overlap": "on"},
        {"enforce_eager": 1},
        {"enable_prefix_caching": "false"},
        {"skip_tokenizer_init": None},
        {"trust_remote_code": "yes"},
        {"model": ""},
        {"model": 7},
        {"tokenizer": b"x"},
        {"served_model_name": []},
        {"served_model_name": ["a", 1]},
        {"served_model_name": ["a", ""]},
        {"served_model_name": {"a"}},
        {"metrics_instance": 0},
        {"dtype": "fp4"},
        {"scheduling_policy": "lifo"},
        {"kv_cache_dtype": "int8"},
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_a_bad_value_is_named_with_its_setting(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**bad)


def test_the_message_about_a_huge_value_is_short() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for value in ("x" * 1_000_000, list(range(1_000_000)), nested, -(10**5000)):
        with pytest.raises(ConfigError) as caught:
            EngineConfig(max_num_seqs=value)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("given", "name", "taken"),
    [
        ({"served_model_name": ["a", "b"]}, "served_model_name", ("a", "b")),
        ({"model": Path("/models/m")}, "model", "/models/m"),
        ({"gpu_memory_utilization": 1}, "gpu_memory_utilization", 1),
        ({"gpu_memory_utilization": Fraction(1, 2)}, "gpu_memory_utilization", 0.5),
        ({"device": "cuda:10"}, "device", "cuda:10"),
        ({"seed": -1}, "seed", -1),
        ({"delay_factor": 0.01}, "max_batch_wait_ms", 10.0),
        ({"delay_factor": 0}, "max_batch_wait_ms", 0.0),
    ],
    ids=str,
)
def test_values_come_in_the_forms_people_type(given: dict[str, Any], name: str, taken: object) -> None:
    value = getattr(EngineConfig.from_mapping(given), name)
    assert value == taken
    assert type(value) is type(taken)


def test_numbers_of_numpy_become_pythons_own() -> None:
    numpy = pytest.importorskip("numpy")
    config = EngineConfig(max_num_seqs=numpy.int64(8), block_size=numpy.int32(32), gpu_memory_utilization=numpy.float32(0.5))
    assert config == EngineConfig(max_num_seqs=8, block_size=32, gpu_memory_utilization=0.5)
    assert (type(config.max_num_seqs), type(config.block_size), type(config.gpu_memory_utilization)) == (int, int, float)


@pytest.mark.parametrize("bad", [None, "soon", True, [1]])
def test_a_delay_factor_is_a_number(bad: object) -> None:
    with pytest.raises(ConfigError, match="delay_factor"):
        EngineConfig.from_mapping({"delay_factor": bad})


def test_delay_factor_and_max_batch_wait_ms_are_one_setting() -> None:
    with pytest.raises(ConfigError, match="same thing"):
        EngineConfig.from_mapping({"delay_factor": 0.01, "max_batch_wait_ms": 10})
    assert EngineConfig(max_batch_wait_ms=5.0).replace(delay_factor=0.01).max_batch_wait_ms == 10.0


def test_replace_keeps_the_rest_and_checks_again() -> None:
    config = EngineConfig(block_size=32, served_model_name=("a", "b"))
    assert config.replace(max_num_seqs=4) == EngineConfig(block_size=32, served_model_name=("a", "b"), max_num_seqs=4)
    assert config.replace() == config
    with pytest.raises(ConfigError, match="block_size"):
        config.replace(block_size=9)
    with pytest.raises(UnknownOptionError, match="'max_num_seqs'"):
        config.replace(max_num_seq=9)


def test_an_unknown_setting_of_any_length_has_a_short_message() -> None:
    with pytest.raises(UnknownOptionError) as caught:
        EngineConfig.from_mapping({"x" * 1_000_000: 1})
    assert len(str(caught.value)) < 1500


def test_a_models_name_in_place_of_a_config_is_explained() -> None:
    with pytest.raises(ConfigError, match="model=NAME"):
        as_config("Qwen/Qwen2-7B", {})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not both"):
        as_config(EngineConfig(), {"max_num_seqs": 1})


def test_a_host_tier_needs_what_finds_its_blocks() -> None:
    with pytest.raises(ConfigError, match=r"swap_space=4 needs prefix caching, .* set enable_prefix_caching"):
        EngineConfig(swap_space=4, enable_prefix_caching=False)
    assert EngineConfig(swap_space=4).swap_space == 4


def test_trust_in_remote_code_is_answered_with_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_: EngineConfig) -> None:
        raise ModelSourceError("no model is needed here")

    monkeypatch.setattr("pagedcore.models.source.resolve_model", refuse)
    for is_trusting in (False, True):
        with pytest.raises(ModelSourceError):
            build_engine(EngineConfig(trust_remote_code=is_trusting))
        assert (REMOTE_CODE_WARNING in caplog.messages) == is_trusting
