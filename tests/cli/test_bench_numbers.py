"""`pagedcore bench`: medians, percentiles, lengths and the prompts made of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.commands.bench.lengths import Lengths, parse_counts, parse_rates
from pagedcore.commands.bench.spread import Spread, percentile, weighted_percentile
from pagedcore.commands.bench.workloads import Load
from pagedcore.errors import ConfigError


def test_the_median_stands_for_the_rounds_and_never_the_best() -> None:
    odd, even = Spread.median_of([9.0, 1.0, 4.0]), Spread.median_of([1.0, 2.0, 8.0, 9.0])
    assert (odd.value, odd.low, odd.high, odd.rounds) == (4.0, 1.0, 9.0, (9.0, 1.0, 4.0))
    assert even.value == 5.0
    assert odd.times(1000) == Spread(4000.0, (9000.0, 1000.0, 4000.0))


@pytest.mark.parametrize(("share", "expected"), [(0.5, 5.0), (0.51, 6.0), (0.9, 9.0), (0.99, 10.0), (1.0, 10.0), (0.0, 1.0)])
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(share: float, expected: float) -> None:
    values = [float(number) for number in (10, 3, 1, 2, 4, 5, 6, 7, 8, 9)]
    assert percentile(values, share) == expected
    assert weighted_percentile([(value, 1.0) for value in values], share) == expected


def test_a_percentile_of_nothing_is_no_number() -> None:
    assert math.isnan(percentile([], 0.5))
    assert math.isnan(weighted_percentile([], 0.5))


def test_a_weighted_value_counts_as_often_as_its_weight() -> None:
    values = [(2.0, 1.0), (1.0, 3.0)]
    assert weighted_percentile(values, 0.75) == 1.0
    assert weighted_percentile(values, 0.76) == 2.0


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1, max_size=30), st.sampled_from([0.25, 0.5, 0.75, 1.0]))
def test_a_weighted_percentile_is_that_of_the_values_repeated(values: list[tuple[float, int]], share: float) -> None:
    repeated = [value for value, count in values for _ in range(count)]
    assert weighted_percentile([(value, float(count)) for value, count in values], share) == percentile(repeated, share)


@pytest.mark.parametrize(
    ("text", "lengths", "shown"), [("128", Lengths(128, 128), "128"), ("100-1024", Lengths(100, 1024), "100 to 1,024")]
)
def test_a_length_is_a_number_or_a_range(text: str, lengths: Lengths, shown: str) -> None:
    assert Lengths.parse(text, "--prompt-tokens") == lengths
    assert str(lengths) == shown


@pytest.mark.parametrize("text", ["", "x", "0", "9-3", "0-5", "1-", "-5", "1.5", "1-2-3", "٣"])
def test_another_length_is_refused_by_its_flag(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--prompt-tokens is "):
        Lengths.parse(text, "--prompt-tokens")


def test_counts_and_rates_come_in_rising_order_and_once() -> None:
    assert parse_counts("64,1,8,8", "--concurrency") == (1, 8, 64)
    assert all(isinstance(count, int) for count in parse_counts("64,1", "--concurrency"))
    assert parse_rates("4.5,2", "--rate") == (2.0, 4.5)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1, 2", "x", "1.5", "-1"])
def test_other_counts_are_refused_by_their_flag(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--batch is .* such as 1,8,64"):
        parse_counts(text, "--batch")


def test_a_load_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    load = Load(num_prompts=20, prompt_tokens=Lengths(3, 9), output_tokens=Lengths(2, 5), seed=1)
    requests = load.requests(100)
    assert requests == load.requests(100)
    assert requests != Load(num_prompts=20, prompt_tokens=Lengths(3, 9), output_tokens=Lengths(2, 5), seed=2).requests(100)
    assert {len(request.prompt) for request in requests} == set(range(3, 10))
    assert {request.num_output_tokens for request in requests} == set(range(2, 6))
    assert all(0 <= token < 100 for request in requests for token in request.prompt)


def test_prompts_begin_alike_where_asked_and_differ_behind() -> None:
    load = Load(num_prompts=3, prompt_tokens=Lengths(10, 10), output_tokens=Lengths(1, 1), num_shared_tokens=4)
    prompts = [request.prompt for request in load.requests(1000)]
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1
    assert len({prompt[4] for prompt in prompts}) == 3


def test_a_prompt_shorter_than_what_is_shared_is_a_part_of_it() -> None:
    load = Load(num_prompts=2, prompt_tokens=Lengths(3, 3), output_tokens=Lengths(1, 1), num_shared_tokens=8)
    first, second = load.requests(1000)
    assert first.prompt == second.prompt
    assert len(first.prompt) == 3
