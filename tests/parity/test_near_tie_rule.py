"""The rule that excuses a difference between two runs excuses near ties and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedcore import EngineConfig, SamplingParams
from pagedcore.outputs import CompletionOutput, Logprob
from support.parity import FLOAT8_TIE_GAP, NEAR_TIE_GAPS, Reference, assert_same_tokens, near_tie_gap

REFERENCE = Reference([5, 6, 7, 8], [2.0, 0.0009, 0.001, 3.0])


def plan_of(dtype: str, **options: Any) -> Any:
    return SimpleNamespace(config=EngineConfig(**options), dtype=dtype, kv_cache_dtype=dtype)


def choice_of(*steps: dict[int, float], index: int = 0) -> CompletionOutput:
    """Each step's tokens with their logprobs, the chosen one first."""
    logprobs = [{token: Logprob(value, 1) for token, value in step.items()} for step in steps]
    return CompletionOutput(index=index, token_ids=[next(iter(step)) for step in steps], logprobs=logprobs)


def test_the_limits_are_those_of_the_design() -> None:
    assert NEAR_TIE_GAPS == {"float32": 1e-3, "bfloat16": 0.05}
    assert near_tie_gap(plan_of("bfloat16")) == 0.05


def test_a_cache_of_8_bits_has_a_limit_of_its_own() -> None:
    plan = plan_of("bfloat16")
    plan.kv_cache_dtype = "fp8_e4m3"
    assert near_tie_gap(plan) == FLOAT8_TIE_GAP


def test_dummy_weights_have_no_near_ties() -> None:
    with pytest.raises(AssertionError, match="random weights"):
        near_tie_gap(plan_of("float32", load_format="dummy"))


def test_equal_runs_are_compared_to_their_end() -> None:
    assert assert_same_tokens(REFERENCE, [5, 6, 7, 8], 1e-3) == 4


def test_after_a_near_tie_nothing_is_compared() -> None:
    assert assert_same_tokens(REFERENCE, [5, 9, 1, 2], 1e-3) == 1


@pytest.mark.parametrize("other", [[9, 6, 7, 8], [5, 6, 9, 8], [5, 6, 7, 9]])
def test_a_difference_at_a_gap_of_the_limit_or_more_fails(other: list[int]) -> None:
    with pytest.raises(AssertionError, match="no near tie"):
        assert_same_tokens(REFERENCE, other, 1e-3)


@pytest.mark.parametrize("other", [[5, 6, 7], [5, 6, 7, 8, 9], []])
def test_another_length_fails_even_at_a_near_tie(other: list[int]) -> None:
    with pytest.raises(AssertionError, match="tokens instead of 4"):
        assert_same_tokens(REFERENCE, other, 1e-3)


def test_logits_give_greedy_tokens_with_their_gaps() -> None:
    reference = Reference.of_logits(torch.tensor([[1.0, 3.0, 2.5], [4.0, 0.0, 0.0]]))
    assert reference.token_ids == [1, 0]
    assert reference.gaps == pytest.approx([0.5, 4.0])


def test_a_greedy_choice_gives_its_gaps() -> None:
    reference = Reference.of_greedy(choice_of({4: -0.25, 1: -1.0}, {7: -0.5, 8: -0.5005}))
    assert reference.gaps == pytest.approx([0.75, 0.0005])


def test_in_a_draw_the_scores_with_their_noise_must_tie() -> None:
    from pagedcore_kernels import gumbel_noise

    params = SamplingParams(temperature=0.5, seed=3, presence_penalty=1.0, frequency_penalty=0.25)
    noise = gumbel_noise(torch.tensor([3]), torch.tensor([1]), torch.tensor([4, 9]))[0].tolist()
    # Token 4 was drawn before: it pays both penalties. Its score is 0.0004 ahead.
    raw = -1.0 + 1.25 - 0.5 * (noise[0] - noise[1]) + 0.0004
    choice = choice_of({4: -0.1}, {4: raw, 9: -1.0})
    reference = Reference.of_draws(choice, params, [4, 9])
    assert reference.gaps[1] == pytest.approx(0.0004, abs=1e-6)
    assert assert_same_tokens(reference, [4, 9], 1e-3) == 1
    with pytest.raises(AssertionError, match="no near tie"):
        assert_same_tokens(Reference.of_draws(choice, params, [4, 8]), [4, 8], 1e-3)  # not even among the likeliest
