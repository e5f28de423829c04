"""From a config and a folder to a runner: every value of the plan is resolved."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from pagedcore.config import EngineConfig
from pagedcore.core.step import AdmittedRow, StepPlan
from pagedcore.errors import ConfigError
from pagedcore.runtime.build import build_runner, resolve_device, resolve_max_num_batched_tokens
from pagedcore.sampling_params import SamplingParams

CPU = torch.device("cpu")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 99,
        "max_position_embeddings": 128,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def config(**changes: object) -> EngineConfig:
    return EngineConfig.from_mapping({"load_format": "dummy", "device": "cpu", "max_num_seqs": 4, "dtype": "float32", **changes})


def test_the_plan_leaves_nothing_at_auto(model_dir: Path) -> None:
    runner, plan = build_runner(config(), model_dir)
    assert (plan.device, plan.dtype, plan.kv_cache_dtype, plan.attention_backend) == ("cpu", "float32", "float32", "torch")
    assert (plan.max_model_len, plan.vocab_size, plan.max_num_batched_tokens, plan.overlap) == (128, 99, 2048, False)
    assert (plan.model_name, plan.model_type, plan.quantization) == (model_dir.name, "llama", None)
    assert (plan.model_dir, plan.tokenizer_dir) == (str(model_dir), str(model_dir))
    assert plan.memory.block_bytes == 2 * 2 * 2 * 8 * 16 * 4
    assert 0 < plan.memory.kv_cache_bytes <= 2 * 2**30
    runner.close()


def test_the_built_runner_generates(model_dir: Path) -> None:
    runner, _ = build_runner(config(num_kv_blocks=3), model_dir)
    row = AdmittedRow(row=0, request_id="r", token_ids=[1, 2, 3], num_prompt_tokens=3, block_ids=[2], params=SamplingParams(temperature=0))
    step = StepPlan(step_id=0, rows=[0], num_tokens=[3], start_positions=[0], samples=[True], admitted=[row])
    assert 0 <= runner.submit(step).result().sampled_token_ids[0] < 99


def test_an_exact_pool_shrinks_auto_and_only_warns_otherwise(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert build_runner(config(num_kv_blocks=3), model_dir)[1].max_model_len == 48
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert build_runner(config(num_kv_blocks=3, max_model_len=100), model_dir)[1].max_model_len == 100
    assert "num_kv_blocks=3 holds 48 tokens, less than max_model_len=100" in caplog.text


def test_max_model_len_above_the_models_own_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 129 .* at most 128"):
        build_runner(config(max_model_len=129), model_dir)


def test_served_names_come_from_the_config_or_the_caller(model_dir: Path) -> None:
    assert build_runner(config(served_model_name=("a", "b")), model_dir)[1].served_model_names == ("a", "b")
    assert build_runner(config(), model_dir, model_name="given")[1].model_name == "given"


def test_the_end_tokens_of_the_plan_are_those_of_generation_config(model_dir: Path) -> None:
    assert build_runner(config(), model_dir)[1].eos_token_ids == {2}
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert build_runner(config(), model_dir)[1].eos_token_ids == {5, 6}


@pytest.mark.parametrize(("kind", "max_num_seqs", "expected"), [("cpu", 256, 2048), ("cpu", 3000, 3000), ("cuda", 256, 8192)])
def test_default_token_budget(kind: str, max_num_seqs: int, expected: int) -> None:
    assert resolve_max_num_batched_tokens(config(max_num_seqs=max_num_seqs), torch.device(kind)) == expected
    assert resolve_max_num_batched_tokens(config(max_num_batched_tokens=77), torch.device(kind)) == 77


def test_a_device_that_is_not_there_is_refused() -> None:
    assert resolve_device("cpu") == CPU
    if not torch.cuda.is_available():
        assert resolve_device("auto") == CPU
        with pytest.raises(ConfigError, match=r"device is 'cuda' .* use device='cpu'"):
            resolve_device("cuda")
