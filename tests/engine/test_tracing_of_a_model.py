"""A whole engine with its settings: the log is written, and a log that cannot be opened gives the memory back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedcore import LLM, SamplingParams
from pagedcore.errors import ConfigError
from pagedcore.runtime.model_runner import ModelRunner
from support.trace_format import check_trace

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
OPTIONS = {"load_format": "dummy", "skip_tokenizer_init": True, "num_kv_blocks": 32, "device": "cpu"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(tmp_path)


def test_a_closed_engine_has_written_its_log_and_its_trace(model: str, tmp_path: Path) -> None:
    with LLM(model, request_log=str(tmp_path / "log"), **OPTIONS) as llm:
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4, ignore_eos=True))
        llm.trace(tmp_path / "trace.json")
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["prompt_tokens"], line["completion_tokens"], line["status"]) for line in lines] == [
        (3, 4, "completed"),
        (2, 4, "completed"),
    ]
    check_trace(json.loads((tmp_path / "trace.json").read_text()))


def test_a_log_that_cannot_be_opened_stops_the_engine_and_frees_the_device(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[ModelRunner] = []
    close = ModelRunner.close
    monkeypatch.setattr(ModelRunner, "close", lambda runner: (closed.append(runner), close(runner))[1])
    with pytest.raises(ConfigError, match="request_log"):
        LLM(model, request_log=str(tmp_path / "no" / "log"), **OPTIONS)
    assert len(closed) == 1
