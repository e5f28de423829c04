"""Models whose weights stay packed, on a GPU: two checkpoints, and what loading takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

CHECKPOINTS = Path(__file__).parent.parent / "data"
LLAMA_7B_OF_4_LAYERS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float16",
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def tokens(folder: Path, dtype: str) -> tuple[str, list[int]]:
    from pagedcore import LLM, SamplingParams

    options = {"device": "cuda", "dtype": dtype, "skip_tokenizer_init": True, "gpu_memory_utilization": 0.1, "max_model_len": 256}
    with LLM(str(folder), **options) as llm:
        (result,) = llm.generate([list(range(5, 45))], SamplingParams(temperature=0.0, max_tokens=16, detokenize=False), use_tqdm=False)
        return llm.engine.plan.linear_backend, list(result.outputs[0].token_ids)


@pytest.mark.parametrize(("name", "dtype"), [("awq-gemm", "float16"), ("gptq-act-order", "bfloat16")])
def test_checkpoints_generate_the_same_tokens_packed_and_dequantized(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedcore.quant import quantized_linear

    packed_backend, packed = tokens(CHECKPOINTS / name, dtype)
    monkeypatch.setattr(quantized_linear, "is_packed_on", lambda device, dtype: False)
    dense_backend, dense = tokens(CHECKPOINTS / name, dtype)
    assert (packed_backend, dense_backend) == ("triton-w4a16", "dequantized")
    assert packed == dense


@pytest.mark.parametrize("stored", [{**GPTQ, "desc_act": False}, {**GPTQ, "desc_act": True}, AWQ], ids=["gptq", "act-order", "awq"])
def test_loading_takes_little_more_than_the_packed_weights(stored: dict[str, object], tmp_path: Path) -> None:
    from pagedcore.models.registry import load_model

    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_7B_OF_4_LAYERS, "quantization_config": stored}))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    device = torch.device("cuda", 0)
    decoder = load_model(tmp_path, dtype=torch.float16, device=device, load_format="dummy", seed=0, max_model_len=None)
    layer_parameters = 4096 * (12288 + 4096 + 22016) + 11008 * 4096
    plain_bytes = 2 * 32000 * 4096 * 2
    assert decoder.linear_backend == "triton-w4a16"
    assert decoder.num_weight_bytes <= 1.01 * (plain_bytes + 4 * layer_parameters * (1 / 2 + 4 / 128))
    assert torch.cuda.max_memory_allocated() - before <= 1.2 * decoder.num_weight_bytes
