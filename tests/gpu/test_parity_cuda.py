"""On a GPU: the tokens and log probabilities of transformers, whatever is graphs, overlap, company, preempted or aborted."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from pagedcore import LLM, AsyncEngine, SamplingParams
from pagedcore.outputs import RequestOutput
from support.parity import NEAR_TIE_GAPS, Reference, Request, assert_same_run, assert_same_tokens, run_alone, run_together, with_logprobs
from support.tiny_models import make_checkpoint

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "std": 0.08,
}


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 1024, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


def engine_options(folder: Path, **options: Any) -> dict[str, Any]:
    common = {"device": DEVICE, "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 32, "num_kv_blocks": 2048}
    return {"model": str(folder), **common, **options}


@pytest.fixture(autouse=True)
def full_precision_matmul() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


# --- transformers -----------------------------------------------------------------------------------------------------


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 48},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
}
PROMPTS = [prompt(length) for length in (1, 17, 130, 300, 700)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)


def logits_of(reference: Any, output: RequestOutput) -> Tensor:
    """Of all tokens of the prompt and the answer but the last."""
    token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([token_ids], device=DEVICE)).logits[0]
    return logits.cpu()


def logprob_errors(logits: Tensor, output: RequestOutput) -> list[float]:
    """How far each log probability that the engine gave is from the reference's."""
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    rows = zip(logits.log_softmax(-1), found, strict=True)
    return [abs(entry.logprob - row[token].item()) for row, entries in rows for token, entry in (entries or {}).items()]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logprobs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference: Any = make_checkpoint(tmp_path, family, **{**SIZES, **FAMILIES[family]}).reference.to(DEVICE)
    with LLM(**engine_options(tmp_path, max_num_batched_tokens=256)) as llm:
        outputs = llm.generate(PROMPTS, GREEDY.replace(logprobs=3, prompt_logprobs=1), use_tqdm=False)
        drawn_by_graphs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    num_equal = 0
    for output, other in zip(outputs, drawn_by_graphs, strict=True):
        logits = logits_of(reference, output)
        assert max(logprob_errors(logits, output)) < NEAR_TIE_GAPS["float32"]
        expected = Reference.of_logits(logits[len(output.prompt_token_ids) - 1 :])
        for one in (output, other):
            num_equal += assert_same_tokens(expected, one.outputs[0].token_ids, NEAR_TIE_GAPS["float32"])
    assert num_equal >= 0.8 * 2 * 20 * len(PROMPTS)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_logprobs_in_bfloat16_are_those_of_transformers_but_for_rounding(family: str, tmp_path: Path) -> None:
    """The reference computes in float32, with weights that are rounded as the engine's. A mean error of 0.02 to 0.05 was seen."""
    reference: Any = make_checkpoint(tmp_path, family, **{**SIZES, **FAMILIES[family]}).reference.bfloat16().float().to(DEVICE)
    with LLM(**engine_options(tmp_path, dtype="bfloat16", max_num_batched_tokens=256, enforce_eager=True)) as llm:
        outputs = llm.generate(PROMPTS, GREEDY.replace(logprobs=3, prompt_logprobs=1), use_tqdm=False)
    errors = [error for output in outputs for error in logprob_errors(logits_of(reference, output), output)]
    assert sum(errors) / len(errors) < 0.1


# --- scheduling -------------------------------------------------------------------------------------------------------

DRAWN = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=40, ignore_eos=True, detokenize=False)
KINDS = [
    DRAWN.replace(temperature=0.0),
    DRAWN,
    DRAWN.replace(top_k=20),
    DRAWN.replace(top_p=1.0, min_p=0.05),
    DRAWN.replace(presence_penalty=0.5, frequency_penalty=0.2),
    DRAWN.replace(temperature=0.0, logit_bias={5: 4.0}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(made, "qwen3", **SIZES)
    return made


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Of every kind; the later half begins like the earlier one, so that blocks are shared."""
    first = [prompt(length, seed) for seed, length in enumerate((5, 16, 33, 100, 64, 200, 17, 90, 301, 40, 3, 128))]
    return [Request([*tokens, 7 + index], KINDS[index % len(KINDS)].replace(seed=index)) for index, tokens in enumerate([*first, *first])]


@pytest.fixture(scope="module")
def alone(folder: Path, requests: list[Request]) -> list[RequestOutput]:
    """Each request by itself: kernel by kernel, step by step, nothing cached."""
    with LLM(**engine_options(folder, enforce_eager=True, overlap=False, enable_prefix_caching=False)) as llm:
        return run_alone(llm, with_logprobs(requests))


def check(llm: LLM, alone: Sequence[RequestOutput], outputs: Sequence[RequestOutput], requests: Sequence[Request]) -> None:
    assert_same_run(alone, outputs, [request.params for request in requests], NEAR_TIE_GAPS["float32"])
    assert llm.stats().num_active_blocks == 0
    llm.check()


@pytest.mark.parametrize(
    "options",
    [{"overlap": False}, {"overlap": True}, {"enforce_eager": True}, {"enable_prefix_caching": False}, {"max_num_batched_tokens": 64}],
    ids=["plain", "overlap", "eager", "no cache", "small chunks"],
)
def test_together_equals_alone(folder: Path, requests: list[Request], alone: list[RequestOutput], options: dict[str, Any]) -> None:
    with LLM(**engine_options(folder, **options)) as llm:
        check(llm, alone, run_together(llm, requests), requests)
        assert llm.stats().num_steps < 40 * len(requests) // 4
        check(llm, alone, run_together(llm, requests), requests)


def test_aborts_and_preemptions_in_flight_change_no_token(folder: Path, requests: list[Request], alone: list[RequestOutput]) -> None:
    victims = range(0, len(requests), 3)

    async def last_output(engine: AsyncEngine, request: Request) -> RequestOutput:
        *_, last = [output async for output in engine.generate(request.prompt, request.params)]
        return last

    async def leave_early(engine: AsyncEngine, request: Request, index: int) -> None:
        stream = engine.generate(request.prompt, dataclasses.replace(request.params, max_tokens=200), f"victim {index}")
        async for output in stream:
            if len(output.outputs[0].token_ids) > index % 7:
                await engine.abort(f"victim {index}")

    async def main(engine: AsyncEngine) -> dict[int, RequestOutput]:
        kept = [index for index in range(len(requests)) if index not in victims]
        leaving = [leave_early(engine, requests[index], index) for index in victims]
        outputs, *_ = await asyncio.gather(asyncio.gather(*(last_output(engine, requests[index]) for index in kept)), *leaving)
        again = await asyncio.gather(*(last_output(engine, requests[index]) for index in victims))
        return dict(zip(kept, outputs, strict=True)) | dict(zip(victims, again, strict=True))

    with LLM(**engine_options(folder, block_size=8, num_kv_blocks=96, max_model_len=512)) as llm:
        outputs = asyncio.run(main(llm.engine))
        check(llm, alone, [outputs[index] for index in range(len(requests))], requests)
        assert llm.stats().num_finished["aborted"] == len(victims)
        assert llm.stats().num_preemptions > 0
