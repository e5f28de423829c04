"""Each sampling setting does to the real model what its name says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from pagedcore import LLM, CompletionOutput, SamplingParams
from support.parity import Reference, assert_same_tokens, near_tie_gap, real_llm

pytestmark = pytest.mark.model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = ["Once upon a time", "The capital of France is", "Water boils at", "She opened the door and"]
END = 2
"""<|im_end|>"""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with real_llm() as made:
        yield made


@pytest.fixture(scope="module")
def greedy(llm: LLM) -> list[CompletionOutput]:
    """Of each prompt, with its likeliest alternatives."""
    return [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY.replace(logprobs=5))]


def choices(llm: LLM, settings: Sequence[SamplingParams], prompts: Sequence[str] = PROMPTS) -> list[CompletionOutput]:
    """Of each prompt with its own setting; all run at once."""
    return [output.outputs[0] for output in llm.generate(list(prompts), list(settings))]


def everywhere(llm: LLM, *settings: SamplingParams) -> list[list[CompletionOutput]]:
    """Every prompt with each of the settings, all at once; one list a setting."""
    found = choices(llm, [params for params in settings for _ in PROMPTS], PROMPTS * len(settings))
    return [found[first : first + len(PROMPTS)] for first in range(0, len(found), len(PROMPTS))]


def test_top_k_1_is_greedy(llm: LLM, greedy: list[CompletionOutput]) -> None:
    drawn = GREEDY.replace(temperature=1.0, seed=3)
    settings = [drawn.replace(top_k=1), drawn.replace(top_p=1e-6), drawn.replace(min_p=1.0), drawn.replace(top_k=1, temperature=1.9)]
    for found in everywhere(llm, *settings):
        for choice, expected in zip(found, greedy, strict=True):
            assert_same_tokens(Reference.of_greedy(expected), choice.token_ids, near_tie_gap(llm.engine.plan))


def test_the_same_seed_gives_the_same_tokens_in_two_calls_and_another_seed_others(llm: LLM) -> None:
    seeded = GREEDY.replace(temperature=1.0, seed=42)
    (first,), (second,) = everywhere(llm, seeded), everywhere(llm, seeded)
    (other,) = everywhere(llm, seeded.replace(seed=43))
    assert [choice.token_ids for choice in first] == [choice.token_ids for choice in second]
    assert all(one.token_ids != two.token_ids for one, two in zip(first, other, strict=True))


def test_unseeded_requests_differ_from_each_other(llm: LLM) -> None:
    drawn = choices(llm, [GREEDY.replace(temperature=1.0)] * 6, [PROMPTS[0]] * 6)
    assert len({tuple(choice.token_ids) for choice in drawn}) == 6


def test_max_tokens_is_exact_and_the_reason_is_length(llm: LLM, greedy: list[CompletionOutput]) -> None:
    counts = (1, 2, 11, 12)
    for count, found in zip(counts, everywhere(llm, *(GREEDY.replace(max_tokens=count) for count in counts)), strict=True):
        for choice, expected in zip(found, greedy, strict=True):
            assert (choice.finish_reason, choice.stop_reason, len(choice.token_ids)) == ("length", None, count)
            assert choice.token_ids == expected.token_ids[:count]


def test_the_end_of_sequence_stops_unless_it_is_ignored(llm: LLM) -> None:
    (stopped,) = llm.chat(QUESTION, GREEDY.replace(ignore_eos=False))
    (ignored,) = llm.chat(QUESTION, GREEDY)
    choice, longer = stopped.outputs[0], ignored.outputs[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert choice.token_ids[-1] == END
    assert choice.token_ids.index(END) == len(choice.token_ids) - 1
    assert choice.text == "The capital of France is Paris."
    assert (longer.finish_reason, len(longer.token_ids)) == ("length", 12)
    assert longer.token_ids[: len(choice.token_ids)] == choice.token_ids


def test_without_max_tokens_an_answer_ends_by_itself_or_at_the_models_length() -> None:
    with real_llm(max_model_len=56) as small:
        (ended,) = small.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=None))
        (full,) = small.generate(list(range(300, 340)), SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    assert ended.outputs[0].finish_reason == "stop"
    assert full.outputs[0].finish_reason == "length"
    assert (len(full.prompt_token_ids), len(full.outputs[0].token_ids)) == (40, 16)


def test_min_tokens_holds_the_end_back(llm: LLM) -> None:
    (free,) = llm.chat(QUESTION, GREEDY.replace(ignore_eos=False))
    (held,) = llm.chat(QUESTION, GREEDY.replace(ignore_eos=False, min_tokens=11))
    num_free = len(free.outputs[0].token_ids)
    choice = held.outputs[0]
    assert num_free < 11 <= len(choice.token_ids)
    assert choice.token_ids[: num_free - 1] == free.outputs[0].token_ids[:-1]
    assert END not in choice.token_ids[:11]


def test_a_stop_token_ends_the_output_where_it_first_comes(llm: LLM, greedy: list[CompletionOutput]) -> None:
    stops = [choice.token_ids[6] for choice in greedy]
    found = choices(llm, [GREEDY.replace(stop_token_ids=[stop, 7]) for stop in stops])
    for choice, expected, stop in zip(found, greedy, stops, strict=True):
        end = expected.token_ids.index(stop) + 1
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        assert choice.token_ids == expected.token_ids[:end]
        assert choice.text == llm.get_tokenizer().decode(expected.token_ids[: end - 1])


def test_min_tokens_holds_stop_tokens_back_too(llm: LLM, greedy: list[CompletionOutput]) -> None:
    stop = greedy[0].token_ids[3]
    (choice,) = choices(llm, [GREEDY.replace(stop_token_ids=[stop], min_tokens=10)], PROMPTS[:1])
    assert len(choice.token_ids) >= 10
    assert stop not in choice.token_ids[:10]
    assert choice.token_ids[:3] == greedy[0].token_ids[:3]


def test_bad_words_are_never_written(llm: LLM, greedy: list[CompletionOutput]) -> None:
    words = [next(word for word in choice.text.replace(".", " ").replace(",", " ").split() if word.isalpha()) for choice in greedy]
    phrase = "".join(llm.get_tokenizer().token_text(token) for token in greedy[0].token_ids[2:5]).strip()
    assert len(phrase.split()) == 3
    settings = [GREEDY.replace(bad_words=[word], max_tokens=24) for word in (*words, phrase)]
    *found, without_phrase = choices(llm, settings, [*PROMPTS, PROMPTS[0]])
    for choice, word in zip(found, words, strict=True):
        assert word not in choice.text
        assert len(choice.token_ids) == 24
    assert phrase not in without_phrase.text
    assert without_phrase.token_ids[:4] == greedy[0].token_ids[:4]  # what begins like the phrase is allowed
    assert without_phrase.token_ids[4] != greedy[0].token_ids[4]


def test_logit_bias_forces_and_forbids(llm: LLM, greedy: list[CompletionOutput]) -> None:
    ranked = [sorted(choice.logprobs[0], key=lambda token, own=choice.logprobs[0]: own[token].rank) for choice in greedy if choice.logprobs]  # type: ignore[misc]
    forbidding = [GREEDY.replace(logit_bias={likeliest[0]: -100}) for likeliest in ranked]
    found = choices(llm, [*forbidding, GREEDY.replace(logit_bias={504: 100})], [*PROMPTS, PROMPTS[0]])
    assert found[-1].token_ids == [504] * 12
    for choice, (first, second, *_) in zip(found[:-1], ranked, strict=True):
        assert choice.token_ids[0] == second
        assert first not in choice.token_ids


def test_logprobs_are_of_the_raw_distribution_whatever_the_settings(llm: LLM, greedy: list[CompletionOutput]) -> None:
    changed = SamplingParams(temperature=1.7, seed=1, max_tokens=1, logprobs=5, repetition_penalty=1.4, logit_bias={504: 100}, top_p=0.5)
    for choice, expected in zip(choices(llm, [changed] * len(PROMPTS)), greedy, strict=True):
        assert choice.token_ids == [504]
        assert choice.logprobs is not None
        assert expected.logprobs is not None
        alternatives = {token: entry for token, entry in choice.logprobs[0].items() if entry.rank <= 5}
        assert {token: entry.rank for token, entry in alternatives.items()} == {t: e.rank for t, e in expected.logprobs[0].items()}
        for token, entry in alternatives.items():
            assert entry.logprob == pytest.approx(expected.logprobs[0][token].logprob, abs=1e-3)
        assert choice.cumulative_logprob == choice.logprobs[0][504].logprob
