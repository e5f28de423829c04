"""Checkpoints of a quantizer that people use: the logits of their dense form, as computed elsewhere, and text through the engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from pagedcore import LLM, SamplingParams
from support.tiny_models import load, run

DATA = Path(__file__).parents[1] / "data"
PROMPT = [(37 * index + 11) % 1024 for index in range(40)]
EXPECTED = {
    "gptq-act-order": ([28, 365, 30, 284, 29], [17.2415, 16.9634, 15.8759, 15.3331, 15.0731], -29944.640, 20.836569),
    "awq-gemm": ([28, 365, 30, 284, 29], [18.3527, 16.6715, 16.5513, 15.7918, 15.6503], -32049.740, 20.880764),
}
"""Likeliest tokens after the prompt and their logits, the sum of all logits, the mean negative log likelihood of the prompt."""
DESCRIPTIONS = {"gptq-act-order": "gptq 4-bit group 64 act-order", "awq-gemm": "awq 4-bit group 64 gemm"}


@pytest.mark.parametrize("name", EXPECTED)
def test_logits_are_those_of_the_dense_model(name: str) -> None:
    token_ids, values, total, mean_nll = EXPECTED[name]
    logits = run(load(DATA / name), torch.tensor(PROMPT))
    top = logits[-1].topk(5)
    assert top.indices.tolist() == token_ids
    torch.testing.assert_close(top.values, torch.tensor(values), atol=1e-3, rtol=0.0)
    assert logits.double().sum().item() == pytest.approx(total, rel=1e-4)
    logprobs = logits[:-1].log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])
    assert -logprobs.mean().item() == pytest.approx(mean_nll, abs=1e-4)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_says_how_it_multiplies_and_answers(name: str, dtype: str) -> None:
    with LLM(str(DATA / name), dtype=dtype, num_kv_blocks=32, max_model_len=256) as llm:
        plan = llm.engine.plan
        assert plan.quantization == DESCRIPTIONS[name]
        assert plan.linear_backend in (("dequantized",) if dtype == "float32" else ("dequantized", "torch-int4"))
        outputs = llm.generate([PROMPT, PROMPT[:9]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8]
        if dtype == "float32":
            assert outputs[0].outputs[0].token_ids[0] == EXPECTED[name][0][0]


def test_packed_weights_of_a_wrong_version_label_are_read_by_their_content(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A symmetric file whose label says v2 while its zero points are those of v1: the content decides, and a warning says so."""
    folder = tmp_path / "mislabelled"
    shutil.copytree(DATA / "gptq-act-order", folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"checkpoint_format": "gptq_v2", "format": "gptq_v2"}
    (folder / "config.json").write_text(json.dumps(config))
    expected = run(load(DATA / "gptq-act-order"), torch.tensor(PROMPT))
    assert torch.equal(run(load(folder), torch.tensor(PROMPT)), expected)
    (record,) = caplog.records
    assert "q_proj.qzeros" in record.getMessage()
