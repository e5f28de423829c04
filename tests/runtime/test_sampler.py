"""The sampler, setting by setting, on vocabularies small enough to compute by hand."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from pagedcore.runtime.sampler import STATUS_ALL_MASKED, STATUS_NOT_FINITE, STATUS_OK
from pagedcore.sampling_params import SamplingParams
from support.sampler_checks import SEEDED, draws, mixed_rows, sample, tokens

GREEDY = SamplingParams(temperature=0.0)
INF = math.inf


def test_greedy_takes_the_largest_and_the_lowest_id_of_a_tie() -> None:
    assert tokens([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]], [GREEDY, GREEDY]) == [1, 0]
    assert tokens([[0.0, 3.0, 3.0, 1.0]], [GREEDY.replace(temperature=9e-6)]) == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_half_precision_are_sampled_in_fp32(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 1.0078125, 0.0]], dtype=dtype)
    assert tokens(logits, [GREEDY.replace(logit_bias={0: 0.0079})]) == [0]
    assert tokens(logits, [GREEDY]) == [1]


def test_top_k_of_one_equals_greedy() -> None:
    logits = torch.randn(20, 500).round()
    assert tokens(logits, [SamplingParams(seed=s, top_k=1) for s in range(20)]) == tokens(logits, [GREEDY] * 20)


def test_the_logits_given_stay_as_they_are() -> None:
    logits, params = mixed_rows(300)
    before = logits.clone()
    sample(logits, params, outputs=[[1, 2]] * 12)
    assert torch.equal(logits, before)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    penalised = GREEDY.replace(repetition_penalty=2.0)
    history = {"prompts": [[0]], "outputs": [[1]]}
    assert tokens([[4.0, 1.0, 1.9]], [penalised], **history) == [0]
    assert tokens([[4.0, 1.0, 2.1]], [penalised], **history) == [2]
    assert tokens([[-1.0, 3.0, 1.6]], [penalised], **history) == [2]
    assert tokens([[-1.0, -1.0, -1.9]], [penalised], **history) == [2]
    assert tokens([[-1.0, -1.0, -2.1]], [penalised], **history) == [0]


def test_presence_penalty_counts_the_output_once_and_not_the_prompt() -> None:
    penalised = GREEDY.replace(presence_penalty=1.0)
    history = {"prompts": [[0, 0]], "outputs": [[1, 1, 1]]}
    assert tokens([[2.0, 2.5, 0.0]], [penalised], **history) == [0]
    assert tokens([[2.0, 3.1, 0.0]], [penalised], **history) == [1]


def test_frequency_penalty_counts_each_occurrence_in_the_output() -> None:
    penalised = GREEDY.replace(frequency_penalty=0.5)
    history = {"prompts": [[0, 0]], "outputs": [[1, 1, 1]]}
    assert tokens([[2.0, 3.4, 0.0]], [penalised], **history) == [0]
    assert tokens([[2.0, 3.6, 0.0]], [penalised], **history) == [1]


def test_repetition_is_applied_before_presence_and_frequency() -> None:
    """4 / 2 - 1 = 1, where (4 - 1) / 2 would be 1.5."""
    params = GREEDY.replace(repetition_penalty=2.0, presence_penalty=1.0)
    assert tokens([[1.2, 4.0]], [params], prompts=[[1]], outputs=[[1]]) == [0]


def test_logit_bias_is_added_after_penalties() -> None:
    """(2 / 2) + 2 = 3, where (2 + 2) / 2 would be 2."""
    params = GREEDY.replace(repetition_penalty=2.0, logit_bias={0: 2.0})
    assert tokens([[2.0, 2.5]], [params], prompts=[[0]]) == [0]


def test_a_mask_beats_any_bias() -> None:
    params = GREEDY.replace(logit_bias={1: 100.0}, bad_words=("x",))
    assert tokens([[0.0, 0.0]], [params], bad_words=((1,),)) == [0]


def test_bias_of_tokens_beyond_the_vocabulary_changes_nothing() -> None:
    assert tokens([[0.0, 1.0]], [GREEDY.replace(logit_bias={7: 100.0})]) == [1]


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [([9, 1], [2, 3], 5), ([9, 2], [3], 5), ([1], [3], 4), ([1], [2], 4), ([2, 3, 1], [], 4), ([3], [], 4)],
)
def test_a_word_of_several_tokens_is_masked_where_it_would_be_finished(prompt: list[int], output: list[int], expected: int) -> None:
    """The word is 2 3 4; token 4 is the likeliest and 5 the next."""
    logits = [[0.0, 0.0, 0.0, 0.0, 9.0, 8.0, 0.0, 0.0, 0.0, 0.0]]
    assert tokens(logits, [GREEDY], prompts=[prompt], outputs=[output], bad_words=((2, 3, 4), (7, 7, 7, 7, 5))) == [expected]


def test_one_token_words_are_masked_always() -> None:
    assert tokens([[0.0, 5.0, 4.0]], [GREEDY], bad_words=((1,),)) == [2]


@pytest.mark.parametrize(("num_output", "expected"), [(0, 0), (1, 0), (2, 1)])
def test_stop_ids_are_masked_until_min_tokens_are_generated(num_output: int, expected: int) -> None:
    params = GREEDY.replace(min_tokens=2)
    assert tokens([[1.0, 5.0, 0.0]], [params], outputs=[[2] * num_output], stop_ids=frozenset({1, 99})) == [expected]


def test_min_tokens_of_one_row_leave_the_others_alone() -> None:
    rows = [[1.0, 5.0], [1.0, 5.0]]
    assert tokens(rows, [GREEDY.replace(min_tokens=2), GREEDY], stop_ids=frozenset({1})) == [0, 1]


def test_temperature_sharpens_and_flattens() -> None:
    logits = [1.0, 0.0]
    cold = Counter(draws(logits, SamplingParams(temperature=0.05)))
    hot = Counter(draws(logits, SamplingParams(temperature=100.0)))
    assert cold == {0: 400}
    assert 150 < hot[0] < 250


def test_draws_follow_the_distribution() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    counts = Counter(draws([math.log(p) for p in probabilities], SEEDED, count=4000))
    chi_square = sum((counts[token] - 4000 * p) ** 2 / (4000 * p) for token, p in enumerate(probabilities))
    assert chi_square < 16.3, "beyond the 99.9 % quantile of 3 degrees of freedom"


def test_top_k_keeps_k_tokens_and_the_lowest_ids_of_a_tie() -> None:
    assert set(draws([1.0, 2.0, 1.0, 2.0, 1.0], SamplingParams(top_k=3))) == {0, 1, 3}
    assert set(draws([1.0, 2.0, 1.0], SamplingParams(top_k=99))) == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = [math.log(p) for p in (0.1, 0.5, 0.2, 0.2)]
    assert set(draws(logits, SamplingParams(top_p=0.49))) == {1}
    assert set(draws(logits, SamplingParams(top_p=0.69))) == {1, 2}
    assert set(draws(logits, SamplingParams(top_p=0.71))) == {1, 2, 3}
    assert set(draws(logits, SamplingParams(top_p=1e-6))) == {1}
    assert set(draws(logits, SamplingParams(top_p=1.0))) == {0, 1, 2, 3}


def test_min_p_drops_what_is_less_likely_than_a_share_of_the_likeliest() -> None:
    logits = [math.log(p) for p in (0.5, 0.26, 0.24)]
    assert set(draws(logits, SamplingParams(min_p=0.51))) == {0, 1}
    assert set(draws(logits, SamplingParams(min_p=0.5))) == {0, 1}
    assert set(draws(logits, SamplingParams(min_p=0.47))) == {0, 1, 2}
    assert set(draws(logits, SamplingParams(min_p=1.0))) == {0}


def test_temperature_comes_before_min_p() -> None:
    """At temperature 2 the ratio 0.09 becomes 0.3."""
    assert set(draws([0.0, math.log(0.09)], SamplingParams(temperature=2.0, min_p=0.2))) == {0, 1}


def test_min_p_comes_before_top_k_and_top_p_and_each_renormalises() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert set(draws(logits, SamplingParams(top_k=2, top_p=0.56))) == {0}, "0.4 of 0.7 is 0.571"
    assert set(draws(logits, SamplingParams(min_p=0.6, top_p=0.56))) == {0}, "min_p leaves 0.4 and 0.3"
    assert set(draws(logits, SamplingParams(top_p=0.56))) == {0, 1}
    assert set(draws(logits, SamplingParams(min_p=0.6, top_k=3))) == {0, 1}


def test_top_p_over_more_tokens_than_the_candidate_list_draws_from_all_of_them() -> None:
    """A flat distribution over 5000 tokens: top_p=0.9 keeps the 4500 lowest ids."""
    drawn = draws([0.0] * 5000, SamplingParams(top_p=0.9), count=60)
    assert max(drawn) < 4500
    assert sum(token >= 1024 for token in drawn) > 30


def test_the_candidate_list_draws_what_the_whole_order_draws() -> None:
    """The same seeds give the same token whether 64, 1024 or all tokens are ordered."""
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(1)) * 4
    seeds = range(40)
    for settings in ({"top_k": 40}, {"top_k": 900, "top_p": 0.99}, {"top_p": 0.8}, {"top_p": 0.95, "min_p": 0.001}):
        fast = tokens(logits, [SamplingParams(seed=s, **settings) for s in seeds])
        assert fast == _draw_plainly(logits, seeds, **settings)


def _draw_plainly(logits: torch.Tensor, seeds: range, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    from pagedcore_kernels import gumbel_noise

    drawn = []
    for row, seed in zip(logits, seeds, strict=True):
        order = torch.argsort(row, descending=True, stable=True)
        order = order[row[order].exp() >= min_p * row.max().exp()]
        order = order[:top_k] if top_k else order
        probabilities = row[order].softmax(0)
        keep = int(((probabilities.cumsum(0) - probabilities) < top_p).sum())
        order = order[:keep]
        noise = gumbel_noise(torch.tensor([seed]), torch.tensor([0]), order)[0]
        drawn.append(int(order[(row[order] + noise).argmax()]))
    return drawn


def test_batch_mates_never_change_a_draw() -> None:
    logits, params = mixed_rows(2500)
    history = [[index, 4, 4] for index in range(12)]
    together = tokens(logits, params, outputs=history)
    alone = [tokens(logits[i : i + 1], [params[i]], outputs=[history[i]])[0] for i in range(12)]
    order = [5, 0, 11, 3, 3, 7]
    reordered = tokens(logits[order], [params[i] for i in order], outputs=[history[i] for i in order])
    assert together == alone
    assert reordered == [alone[i] for i in order]


def test_a_seed_repeats_its_draw_and_the_output_index_changes_it() -> None:
    flat = [[0.0] * 1000] * 4
    params = [SamplingParams(seed=5)] * 3 + [SamplingParams(seed=-5)]
    first = tokens(flat, params, outputs=[[], [], [1], []])
    assert first == tokens(flat, params, outputs=[[], [], [1], []])
    assert first[0] == first[1]
    assert len({first[0], first[2], first[3]}) == 3


def test_the_prompts_length_does_not_change_a_draw() -> None:
    flat = [[0.0] * 1000] * 2
    first, second = tokens(flat, [SEEDED] * 2, prompts=[[1], [1, 2, 3, 4]], outputs=[[7], [7]])
    assert first == second


@pytest.mark.parametrize("params", [GREEDY, SEEDED, SamplingParams(seed=1, top_k=3), SamplingParams(seed=1, top_p=0.5, min_p=0.1)])
def test_nan_and_infinite_logits_fail_their_row_alone(params: SamplingParams) -> None:
    rows = [[0.0, 1.0, 2.0], [0.0, math.nan, 2.0], [INF, 0.0, 0.0], [-INF, -INF, -INF], [-INF, 0.0, -INF]]
    result = sample(rows, [params] * 5)
    status = result.status.tolist()
    assert status == [STATUS_OK, STATUS_NOT_FINITE, STATUS_NOT_FINITE, STATUS_NOT_FINITE, STATUS_OK]
    assert result.token_ids.tolist()[4] == 1
    assert result.token_ids.tolist()[0] == tokens(rows[:1], [params])[0]


@pytest.mark.parametrize("params", [GREEDY, SEEDED, SamplingParams(seed=1, top_k=2), SamplingParams(seed=1, top_p=0.5)])
def test_all_tokens_masked_is_an_error_of_that_row(params: SamplingParams) -> None:
    result = sample([[0.0, 1.0]] * 2, [params, params.replace(min_tokens=1)], stop_ids=frozenset({0, 1}))
    assert result.status.tolist() == [STATUS_OK, STATUS_ALL_MASKED]


def test_logprobs_are_of_the_raw_distribution_and_ties_rank_by_id() -> None:
    params = GREEDY.replace(temperature=0.0, logprobs=2, logit_bias={3: 100.0})
    result = sample([[math.log(p) for p in (0.4, 0.3, 0.2, 0.1)], [0.0, 1.0, 1.0, 1.0]], [params, params])
    assert result.logprobs is not None
    first, second = result.logprobs.dicts([2, 2])
    assert {token: entry.rank for token, entry in first.items()} == {3: 4, 0: 1, 1: 2}
    assert first[3].logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert {token: entry.rank for token, entry in second.items()} == {3: 3, 1: 1, 2: 2}


def test_logprobs_of_zero_alternatives_hold_the_token_itself() -> None:
    result = sample([[0.0, 1.0]], [GREEDY.replace(logprobs=0)])
    assert result.logprobs is not None
    assert list(result.logprobs.dicts([0])[0]) == [1]
