"""The whole engine on a CUDA device, with random weights of a small shape and no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

PROMPT = list(range(3, 103))
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def options(model_dir: Path, **changes: object) -> dict[str, object]:
    return {
        "model": str(model_dir),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": "cuda",
        "gpu_memory_utilization": 0.1,
        **changes,
    }


def test_torch_sees_the_engines_memory_in_this_process(model_dir: Path) -> None:
    import torch

    from pagedcore import LLM

    def allocated() -> int:
        return torch.cuda.memory_allocated()

    left: list[int] = []
    for _ in range(2):  # the first one of a process leaves workspaces of torch's products and of the kernels to the next
        before = allocated()
        with LLM(**options(model_dir)) as llm:  # type: ignore[arg-type]
            stats = llm.stats()
            assert stats.device_memory_bytes_by_kind["kv_cache"] > 1 << 30
            taken = stats.device_memory_bytes_by_kind["weights"] + stats.device_memory_bytes_by_kind["kv_cache"]
            assert allocated() - before >= taken
            assert llm.engine.plan.overlap
        left.append(allocated() - before)
    assert left[0] < 256 << 20
    assert left[1] < 64 << 20


@pytest.mark.parametrize("overlap", [True, False])
def test_the_cache_serves_and_no_block_is_lost(model_dir: Path, overlap: bool) -> None:
    from pagedcore import LLM, SamplingParams

    params = SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True)
    with LLM(**options(model_dir, overlap=overlap, dtype="float32")) as llm:  # type: ignore[arg-type]
        first = llm.generate([[*PROMPT, i] for i in range(32)], params)
        again = llm.generate([[*PROMPT, i] for i in range(32)], params)
        assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in again]
        assert all(len(o.outputs[0].token_ids) == 40 for o in first)
        assert all(o.num_cached_tokens == 96 for o in again)
        assert llm.stats().num_active_blocks == 0
        llm.check()


def test_a_tiny_pool_preempts_and_changes_no_token(model_dir: Path) -> None:
    from pagedcore import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = [[i + 5, *PROMPT[:40]] for i in range(12)]
    with LLM(**options(model_dir, dtype="float32")) as ample:  # type: ignore[arg-type]
        expected = [o.outputs[0].token_ids for o in ample.generate(prompts, params)]
    with LLM(**options(model_dir, dtype="float32", num_kv_blocks=24, max_model_len=128)) as tiny:  # type: ignore[arg-type]
        outputs = tiny.generate(prompts, params)
        assert tiny.stats().num_preemptions > 0
        assert [o.outputs[0].token_ids for o in outputs] == expected
        tiny.check()


def test_an_engine_that_starts_meanwhile_changes_no_token(model_dir: Path) -> None:
    """Recording graphs runs products beside those of an engine that serves."""
    import threading

    from pagedcore import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)

    def start_and_close() -> None:
        LLM(**options(model_dir, gpu_memory_utilization=0.2)).close()  # type: ignore[arg-type]

    with LLM(**options(model_dir, enable_prefix_caching=False)) as llm:  # type: ignore[arg-type]
        expected = llm.generate([PROMPT], params)[0].outputs[0].token_ids
        starting = threading.Thread(target=start_and_close)
        starting.start()
        while starting.is_alive():
            assert llm.generate([PROMPT], params)[0].outputs[0].token_ids == expected
        assert llm.generate([PROMPT], params)[0].outputs[0].token_ids == expected
