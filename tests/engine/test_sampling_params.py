"""Sampling parameters: what is taken, and how what is wrong is named, whatever a client sends."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pagedcore.errors import InvalidRequestError
from pagedcore.sampling_params import SamplingParams


def deep(levels: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    "bad",
    [
        {"n": 0},
        {"n": 129},
        {"n": True},
        {"n": 1.0},
        {"n": None},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "1"},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"top_k": 2**31},
        {"top_k": 1.5},
        {"min_p": -0.1},
        {"min_tokens": -1},
        {"min_tokens": 2**31},
        {"max_tokens": 0},
        {"max_tokens": "16"},
        {"repetition_penalty": 0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": math.nan},
        {"logprobs": 65},
        {"logprobs": True},
        {"prompt_logprobs": -1},
        {"seed": 2**64},
        {"seed": -(2**63) - 1},
        {"seed": 1.0},
        {"stop": 5},
        {"stop": ["a", 5]},
        {"stop": ""},
        {"stop": b"a"},
        {"stop": deep(100_000)},
        {"stop": [["x" * 1_000_000]]},
        {"bad_words": [" "]},
        {"stop_token_ids": "12"},
        {"stop_token_ids": b"12"},
        {"stop_token_ids": [True]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": 5},
        {"logit_bias": [1]},
        {"logit_bias": {1: 101}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: 10**400}},
        {"logit_bias": {1: "5"}},
        {"logit_bias": {1: None}},
        {"logit_bias": {-1: 5}},
        {"logit_bias": {1.5: 5}},
        {"logit_bias": {math.inf: 5}},
        {"logit_bias": {"x": 5}},
        {"logit_bias": {"9" * 5000: 5}},
        {"logit_bias": {True: 5}},
        {"logit_bias": dict.fromkeys(range(100_000), "x")},
        {"ignore_eos": 1},
        {"ignore_eos": "false"},
        {"detokenize": None},
        {"skip_special_tokens": "no"},
        {"include_stop_str_in_output": 0},
        {"temperature": 10**5000},
        {"n": 10**5000},
        {"max_tokens": -(10**5000)},
    ],
    ids=lambda bad: f"{next(iter(bad))}-{type(next(iter(bad.values()))).__name__}",
)
def test_a_bad_value_is_named_by_its_field_in_a_short_message(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**bad)
    assert caught.value.param == name
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("given", "name", "taken"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"stop": "a"}, "stop", ("a",)),
        ({"stop": None}, "stop", ()),
        ({"stop_token_ids": [1, 2]}, "stop_token_ids", (1, 2)),
        ({"logit_bias": {"7": 1}}, "logit_bias", {7: 1.0}),
        ({"seed": -1}, "seed", -1),
        ({"max_tokens": None}, "max_tokens", None),
    ],
    ids=str,
)
def test_values_come_in_the_forms_people_type(given: dict[str, Any], name: str, taken: object) -> None:
    assert getattr(SamplingParams(**given), name) == taken


def test_numbers_of_numpy_become_pythons_own() -> None:
    numpy = pytest.importorskip("numpy")
    params = SamplingParams(
        max_tokens=numpy.int64(3),
        temperature=numpy.float32(0.5),
        stop_token_ids=[numpy.int32(4)],
        logit_bias={numpy.int64(5): numpy.float32(1)},
    )
    assert params == SamplingParams(max_tokens=3, temperature=0.5, stop_token_ids=[4], logit_bias={5: 1.0})
    assert (type(params.max_tokens), type(params.temperature), type(params.stop_token_ids[0])) == (int, float, int)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match="lower min_tokens") as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.param == "min_tokens"


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidRequestError, match="detokenize=True"):
        SamplingParams(stop=["a"], detokenize=False)


@pytest.mark.parametrize("has_prompt_logprobs", [True, False])
def test_a_choice_asks_for_what_a_checked_copy_would(has_prompt_logprobs: bool) -> None:
    asked = SamplingParams(
        n=3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, max_tokens=9, min_tokens=2, stop="end", stop_token_ids=[4], bad_words=["no"],
        logit_bias={5: 1.5}, repetition_penalty=1.1, logprobs=2, prompt_logprobs=3, skip_special_tokens=False,
    )  # fmt: skip
    checked = asked.replace(n=1, seed=11, prompt_logprobs=3 if has_prompt_logprobs else None)
    assert asked.for_choice(11, has_prompt_logprobs=has_prompt_logprobs) == checked
    assert (asked.n, asked.seed, asked.prompt_logprobs) == (3, None, 3)
