"""Decode steps that read a shared prefix once, as CUDA graphs: the same tokens as rows alone, and as without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagedcore.runtime import decode_graphs, shared_prefix
from support import runner_checks, runner_driver

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def full_precision_matmul() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix of one block is read once."""
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_BYTES", 1)
    monkeypatch.setattr(shared_prefix, "PADDING_ROW_BYTES", 0)


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("backend", ["torch", "triton", "triton and graphs"])
def test_rows_that_share_a_prefix_equal_alone(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_driver, "ATTENTION_BACKEND", backend.split(maxsplit=1)[0])
    monkeypatch.setattr(runner_driver, "CAPTURES_GRAPHS", "graphs" in backend)
    runner_checks.check_rows_that_share_a_prefix_equal_alone("cuda")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def generate(model_dir: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> tuple[list[list[int]], int]:
    """Tokens of requests that come and go, most of which begin alike; and in how many sets of rows a prefix was read once."""
    from pagedcore import LLM, SamplingParams

    found: list[int] = []
    find = shared_prefix.find_shared_prefix

    def noting(*args: object) -> shared_prefix.SharedPrefix | None:
        prefix = find(*args)  # type: ignore[arg-type]
        found.extend([] if prefix is None else [prefix.num_blocks])
        return prefix

    monkeypatch.setattr(decode_graphs, "find_shared_prefix", noting)
    stem = [(7 * i) % 900 + 3 for i in range(500)]
    prompts = [[*stem[: 500 - 90 * (i % 3)], 3 + i, 5 + i, 9 + 2 * i] for i in range(40)] + [[3 + i] * 30 for i in range(4)]
    params = [SamplingParams(temperature=0.0, max_tokens=5 + 3 * (i % 9), ignore_eos=True) for i in range(len(prompts))]
    common = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "dtype": "float32", "num_kv_blocks": 4000}
    with LLM(model=str(model_dir), **common, **options) as llm:  # type: ignore[arg-type]
        llm.generate([stem], SamplingParams(temperature=0.0, max_tokens=1))
        outputs = llm.generate(prompts, params)
        llm.check()
    return [output.outputs[0].token_ids for output in outputs], len(found)


@pytest.mark.parametrize("max_num_seqs", [64, 20])
def test_requests_that_begin_alike_get_the_same_tokens(model_dir: Path, max_num_seqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, never = generate(model_dir, monkeypatch, max_num_seqs=max_num_seqs)
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_BYTES", 1)
    monkeypatch.setattr(shared_prefix, "PADDING_ROW_BYTES", 0)
    shared, often = generate(model_dir, monkeypatch, max_num_seqs=max_num_seqs)
    eager, _ = generate(model_dir, monkeypatch, max_num_seqs=max_num_seqs, enforce_eager=True)
    assert shared == plain == eager
    assert never == 0 and often > 5
