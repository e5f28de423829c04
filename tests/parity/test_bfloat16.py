"""The embedded model in bfloat16, which a user may ask for on a CPU: how far from float32, and what depends on the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedcore import LLM, RequestOutput, SamplingParams
from pagedcore.models.embedded import ensure_embedded_model
from pagedcore.quant import linear
from pagedcore.quant.cpu import packed_linear
from pagedcore.runtime.logprobs import token_logprobs
from support.parity import STEM, real_llm

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = [
    "Once upon a time", "The capital of France is", "😀 🎉 🚀", "东京是日本的首都。", "def fibonacci(n):\n", "The cat sat on the mat.",
    "SELECT name FROM users WHERE", "In 1984, the",
]  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5)
INVARIANT_ROWS = 48
"""oneDNN's AMX products with one thread: from this many rows on each row is added up in the same order, whatever the others are."""


def has_amx() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text(encoding="utf-8")


def run_alone_and_together(llm: LLM) -> list[tuple[RequestOutput, RequestOutput]]:
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    return list(zip(alone, llm.generate(PROMPTS, GREEDY), strict=True))


@pytest.mark.skipif(not has_amx() or torch.get_num_threads() > 1, reason="needs AMX and OMP_NUM_THREADS=1")
def test_nothing_but_products_of_few_rows_depends_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every product padded to rows enough, alone and together are the same to the last bit: paging, attention, sampling and
    scheduling add nothing of their own."""

    def padded(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        missing = max(0, INVARIANT_ROWS - x.shape[0])
        return packed_linear(torch.cat([x, x.new_zeros(missing, x.shape[1])]), packed, bias)[: x.shape[0]]

    monkeypatch.setattr(linear, "packed_linear", padded)
    with real_llm(dtype="bfloat16", enable_prefix_caching=False) as llm:
        for alone, together in run_alone_and_together(llm):
            assert together.outputs[0].token_ids == alone.outputs[0].token_ids
            assert together.outputs[0].logprobs == alone.outputs[0].logprobs


def test_bfloat16_is_as_near_to_float32_as_it_is_in_transformers() -> None:
    from transformers import AutoModelForCausalLM

    folder = ensure_embedded_model()
    with real_llm(dtype="bfloat16", enable_prefix_caching=False) as llm:
        token_ids = llm.get_tokenizer().encode(STEM)[:160]
        (output,) = llm.generate(token_ids, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    ours = own_logprobs(output)

    def reference(dtype: torch.dtype) -> Tensor:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        with torch.inference_mode():
            logits = model.eval()(torch.tensor([token_ids])).logits[0, :-1]
        return token_logprobs(logits, torch.tensor(token_ids[1:]), 0).values[:, 0]

    exact = reference(torch.float32)
    error, usual = (ours - exact).abs(), (reference(torch.bfloat16) - exact).abs()
    assert error.mean() < 1.3 * usual.mean()
    assert error.mean() > 0


def own_logprobs(output: RequestOutput) -> Tensor:
    """Of each prompt token but the first, under what came before it."""
    assert output.prompt_logprobs is not None
    steps = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([entries[token].logprob for token, entries in steps if entries is not None])
