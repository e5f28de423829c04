"""The same weights in transformers: logits, log probabilities, greedy tokens, penalties and chat prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, RepetitionPenaltyLogitsProcessor

from pagedcore import LLM, SamplingParams
from support.parity import STEM, Reference, assert_same_tokens, near_tie_gap, real_llm

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = {
    "english": "The lighthouse keeper wrote in his diary every night, and",
    "code": "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "chinese": "人工智能正在改变我们的生活方式，",
    "emoji": "Weather report: ☀️ 🌧️ ❄️ ☀️ 🌧️",
    "digits": "3.14159 2.71828 1.41421 1.61803",
    "one-token": "The",
    "long": STEM + "how much is a ticket for my dog and my two children?",
}
LOGIT_TOLERANCE = 1e-3
"""Logits reach 40, and both add up 30 layers in float32, each in its own order; 1e-4 was seen."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Chunks of 96 tokens, so that the long prompt is computed in several."""
    with real_llm(max_num_batched_tokens=96, enable_prefix_caching=False) as made:
        yield made


@pytest.fixture(scope="module")
def reference(llm: LLM) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(llm.model_dir, dtype=torch.float32)
    return model.eval()


def logits_of(reference: Any, token_ids: list[int]) -> Tensor:
    """[T, V]."""
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([token_ids])).logits[0]
        return logits.float()


def engine_logits(llm: LLM, token_ids: list[int], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """[T, V], computed by the engine over its paged memory. Of the last chunk's tokens the sampling one comes first."""
    model: Any = llm.engine.loop._runner._model  # type: ignore[attr-defined]
    forward, seen = model.forward, []

    def keep(batch: Any) -> Tensor:
        logits: Tensor = forward(batch)
        seen.append(logits.float().clone())
        return logits

    monkeypatch.setattr(model, "forward", keep)
    llm.generate(token_ids, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    last, before = seen[-1][:1], seen[-1][1:]
    return torch.cat([*seen[:-1], before, last])


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_of_the_whole_vocabulary_are_the_references(llm: LLM, reference: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids = llm.get_tokenizer().encode(PROMPTS[name])
    logits = engine_logits(llm, token_ids, monkeypatch)
    torch.testing.assert_close(logits, logits_of(reference, token_ids), atol=LOGIT_TOLERANCE, rtol=0.0)


def test_prompt_logprobs_are_the_references_and_the_first_is_none(llm: LLM, reference: Any) -> None:
    outputs = llm.generate(list(PROMPTS.values()), SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=5))
    for output in outputs:
        token_ids, found = output.prompt_token_ids, output.prompt_logprobs
        assert found is not None
        assert len(found) == len(token_ids)
        assert found[0] is None
        logprobs = logits_of(reference, token_ids).log_softmax(-1)
        for position, entries in enumerate(found[1:], start=1):
            assert entries is not None
            assert 5 <= len(entries) <= 6
            row = logprobs[position - 1]
            for token, entry in entries.items():
                assert entry.logprob == pytest.approx(row[token].item(), abs=LOGIT_TOLERANCE)
            own = entries[token_ids[position]]
            ahead, near = (row > row[token_ids[position]]).sum().item(), (row - row[token_ids[position]]).abs() < LOGIT_TOLERANCE
            assert ahead + 1 - near.sum().item() < own.rank < ahead + 1 + near.sum().item()
            assert own.decoded_token == llm.get_tokenizer().token_text(token_ids[position])


def test_greedy_continuations_and_their_logprobs_are_the_references(llm: LLM, reference: Any) -> None:
    outputs = llm.generate(list(PROMPTS.values()), SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=3))
    num_equal = 0
    for output in outputs:
        (choice,) = output.outputs
        assert len(choice.token_ids) == 16
        # The reference's greedy tokens, as long as its own last token is ours too: up to the first difference.
        logits = logits_of(reference, [*output.prompt_token_ids, *choice.token_ids[:-1]])[len(output.prompt_token_ids) - 1 :]
        num_equal += assert_same_tokens(Reference.of_logits(logits), choice.token_ids, near_tie_gap(llm.engine.plan))
        assert choice.logprobs is not None
        for row, entries in zip(logits.log_softmax(-1), choice.logprobs, strict=True):
            for token, entry in entries.items():
                assert entry.logprob == pytest.approx(row[token].item(), abs=LOGIT_TOLERANCE)
    assert num_equal >= 0.8 * 16 * len(PROMPTS)


def repetition(row: Tensor, prompt: list[int], output: list[int]) -> Tensor:
    penalised: Tensor = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([prompt + output]), row[None])
    return penalised[0]


def presence(row: Tensor, prompt: list[int], output: list[int]) -> Tensor:
    return row - 1.5 * (torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(row)) > 0)


def frequency(row: Tensor, prompt: list[int], output: list[int]) -> Tensor:
    return row - 0.75 * torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(row))


PENALTIES = {"repetition_penalty": (1.5, repetition), "presence_penalty": (1.5, presence), "frequency_penalty": (0.75, frequency)}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_are_those_of_their_formulas_on_the_references_logits(llm: LLM, reference: Any, name: str) -> None:
    """Repetition looks at prompt and output, the other two at the output alone."""
    value, penalise = PENALTIES[name]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = ["1 1 1 2 2 2", "I like apples, I like pears, I like", "no no no no"]
    plain = llm.generate(prompts, params)
    outputs = llm.generate(prompts, params.replace(**{name: value}))
    for output in outputs:
        prompt, token_ids = output.prompt_token_ids, output.outputs[0].token_ids
        rows = logits_of(reference, [*prompt, *token_ids[:-1]])[len(prompt) - 1 :]
        expected = torch.stack([penalise(row, prompt, token_ids[:index]) for index, row in enumerate(rows)])
        assert_same_tokens(Reference.of_logits(expected), token_ids, near_tie_gap(llm.engine.plan))
    assert sum(output.outputs[0].token_ids != other.outputs[0].token_ids for output, other in zip(outputs, plain, strict=True)) >= 2


def test_prompts_come_back_with_the_ids_that_the_references_tokenizer_gives(llm: LLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llm.model_dir)
    one = SamplingParams(temperature=0.0, max_tokens=1)
    outputs = llm.generate(list(PROMPTS.values()), one)
    assert [output.prompt for output in outputs] == list(PROMPTS.values())
    assert [output.prompt_token_ids for output in outputs] == [tokenizer(text).input_ids for text in PROMPTS.values()]
    assert llm.generate([outputs[0].prompt_token_ids], one)[0].prompt_token_ids == outputs[0].prompt_token_ids


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "Answer in rhymes."}, {"role": "user", "content": "Hi 👋"}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "你好 2024"}],
    ],
)
def test_chat_prompts_have_the_references_ids(llm: LLM, messages: list[dict[str, str]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llm.model_dir)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=1))
    assert output.prompt == text
    assert output.prompt_token_ids == tokenizer(text, add_special_tokens=False).input_ids


def test_the_capital_of_france(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0.0, max_tokens=20))
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
