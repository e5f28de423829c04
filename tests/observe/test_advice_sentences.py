"""The words of the advice, exact for constructed numbers and for constructed prompts."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from pagedcore.advice.costly_prefixes import MAX_PREFIXES, CostlyPrefix, CostlyPrefixes
from pagedcore.advice.divergence import MAX_DOMAINS, Divergence, DivergenceFinder, longest_shared_run, num_common_tokens
from pagedcore.advice.reuse_sketch import POOL_FACTORS, CurvePoint
from pagedcore.advice.sentences import Findings, write_sentences
from pagedcore.core.block_hash import make_domain

FLAT = (0.6,) * 6


def make_findings(rates: dict[int, tuple[float, ...]] | None = None, **changes: Any) -> Findings:
    """Block size -> the rate at each pool factor; 1,000 blocks of 16 tokens at 1x."""
    rates = {16: FLAT} if rates is None else rates
    curve = [
        CurvePoint(factor, int(1000 * 16 * factor) // size, size, rate)
        for size, of_size in rates.items()
        for factor, rate in zip(POOL_FACTORS, of_size, strict=True)
    ]
    facts: dict[str, Any] = {"block_size": 16, "hit_rate": 0.6, "ideal_hit_rate": 0.62, "is_caching_on": True, "num_lookups": 16}
    return Findings(curve=curve, **{**facts, "divergences": (), "shared_tail_tokens": None, **changes})


@pytest.mark.parametrize(
    ("rates", "sentence"),
    [
        ((0.3, 0.5, 0.61, 0.84, 0.85, 0.86), "A pool twice as large (num_kv_blocks=2000) would raise the hit rate from 61 % to 84 %."),
        ((0.3, 0.5, 0.61, 0.62, 0.84, 0.85), "A pool four times as large (num_kv_blocks=4000) would raise the hit rate from 61 % to 84 %."),
        ((0.3, 0.5, 0.6, 0.6, 0.6, 0.9), "A pool eight times as large (num_kv_blocks=8000) would raise the hit rate from 60 % to 90 %."),
        ((0.3, 0.4, 0.6, 0.61, 0.615, 0.619), "The cache needs no change: it serves 60 % of a possible 62 %."),
    ],
)
def test_the_pool_that_brings_most_of_the_gain_is_named(rates: tuple[float, ...], sentence: str) -> None:
    assert write_sentences(make_findings({16: rates})) == (sentence,)


def test_a_block_size_that_gains_is_named_with_its_reason() -> None:
    rates = {8: (0.3, 0.5, 0.69, 0.69, 0.69, 0.69), 16: FLAT, 32: (0.1, 0.2, 0.7, 0.7, 0.7, 0.7)}
    assert write_sentences(make_findings({8: rates[8], 16: FLAT}, shared_tail_tokens=12.2)) == (
        "Block size 8 would gain 9 points: shared prefixes end 12 tokens into a block on average.",
    )
    assert write_sentences(make_findings({8: rates[8], 16: FLAT})) == ("Block size 8 would gain 9 points.",)
    assert write_sentences(make_findings({16: FLAT, 32: rates[32]}, shared_tail_tokens=12.2)) == ("Block size 32 would gain 10 points.",)


def test_divergence_is_told_for_two_tenants_at_most() -> None:
    divergences = [Divergence("T", 37, 1900), Divergence(None, 1024, 300), Divergence("U", 5, 200)]
    assert write_sentences(make_findings({16: FLAT}, divergences=divergences)) == (
        "The prompts of tenant T diverge at token 37, before a shared body of 1,900 tokens: move what varies behind it.",
        "The prompts without a tenant diverge at token 1,024, before a shared body of 300 tokens: move what varies behind it.",
    )


def test_before_the_first_lookup_nothing_is_advised() -> None:
    nothing = ("No request has been looked up yet, so there is nothing to advise.",)
    assert write_sentences(make_findings({}, hit_rate=None, ideal_hit_rate=None)) == nothing


def test_of_a_few_prompts_nothing_is_concluded() -> None:
    rates = {16: (0.1, 0.2, 0.3, 0.8, 0.8, 0.8)}
    assert write_sentences(make_findings(rates, num_lookups=15)) == ("Advice needs 16 prompts; 15 were looked up so far.",)
    assert write_sentences(make_findings(rates, num_lookups=16))[0].startswith("A pool twice as large")


def test_far_from_the_ideal_it_is_not_called_well() -> None:
    (sentence,) = write_sentences(make_findings(ideal_hit_rate=0.95))
    assert sentence == (
        "The hit rate is 60 % of a possible 95 %, and neither a pool up to eight times as large nor another block size would raise it "
        "by two points."
    )


def test_without_prefix_caching_its_gain_is_all_there_is_to_say() -> None:
    findings = make_findings({16: (0.1, 0.2, 0.61, 0.8, 0.8, 0.8)}, is_caching_on=False, hit_rate=0.0, ideal_hit_rate=0.0)
    assert write_sentences(findings) == ("Prefix caching is off; with it, this pool would serve 61 % of the prompt tokens.",)
    assert write_sentences(make_findings({}, is_caching_on=False)) == ("Prefix caching is off.",)


def test_where_requests_take_blocks_from_each_other_that_comes_first_and_the_rates_are_called_rough() -> None:
    sentence = (
        "Requests took blocks from each other (12 preemptions, 1,200 prompts): what runs at once needs a larger pool or a lower "
        "max_num_seqs, and until then the predicted rates are rough."
    )
    assert write_sentences(make_findings(num_preemptions=12, num_lookups=1200)) == (sentence,)
    assert write_sentences(make_findings(num_preemptions=11, num_lookups=1200)) == (
        "The cache needs no change: it serves 60 % of a possible 62 %.",
    )
    rates = {16: (0.3, 0.5, 0.61, 0.84, 0.85, 0.86)}
    assert write_sentences(make_findings(rates, num_preemptions=12, num_lookups=1200))[0] == sentence


def test_a_curve_without_the_present_pool_advises_no_pool() -> None:
    assert write_sentences(make_findings({})) == ("The cache needs no change: it serves 60 % of a possible 62 %.",)


def test_prompts_with_a_varying_head_before_a_shared_body_are_found() -> None:
    rng = random.Random(2)
    head, body = rng.choices(range(1000), k=37), rng.choices(range(1000), k=1900)
    finder = DivergenceFinder()
    for number in range(20):
        stamp = [10_000 + number] * rng.randint(5, 30)
        finder.examine(make_domain(None, "T"), "T", head + stamp + body + rng.choices(range(1000), k=50))
        finder.examine(make_domain(None, "U"), "U", head + body + [number])
    [found] = finder.divergences()
    assert (found.tenant, found.token) == ("T", 37)
    assert 1900 <= found.num_body_tokens <= 1902


def test_the_same_prompts_of_two_tenants_are_no_finding() -> None:
    finder, body = DivergenceFinder(), list(range(500))
    for number in range(40):
        tenant = f"tenant {number}"
        finder.examine(make_domain(None, tenant), tenant, [number, *body])
    assert finder.divergences() == []
    assert len(finder._peers) == MAX_DOMAINS


def test_a_few_prompts_are_no_pattern() -> None:
    finder, body = DivergenceFinder(), list(range(500))
    for number in range(8):
        finder.examine(make_domain(None, None), None, [1000 + number, *body])
    assert finder.divergences() == []
    finder.examine(make_domain(None, None), None, [1008, *body])
    assert finder.divergences() == [Divergence(None, 0, 500)]


def test_shared_runs_are_measured_to_the_token() -> None:
    shared = list(range(100, 151))
    ours, theirs = array("i", [1, 2, 3, *shared, 4]), array("i", [9, 8, 7, 6, 5, *shared, 10, 11])
    assert longest_shared_run(ours, theirs, 0) == 51
    assert longest_shared_run(theirs, ours, 0) == 51
    assert longest_shared_run(ours, array("i", range(1000, 1060)), 0) == 0
    assert longest_shared_run(ours, array("i"), 0) == 0
    assert (num_common_tokens([1, 2, 3], [1, 2, 4]), num_common_tokens([1, 2], [1, 2, 3]), num_common_tokens([], [1])) == (2, 2, 0)


def paid(prefix: str, recomputed_tokens: int, request_id: str = "r") -> CostlyPrefix:
    return CostlyPrefix(prefix=prefix, tenant="t", num_tokens=64, recomputed_tokens=recomputed_tokens, latest_request_id=request_id)


def test_the_ten_prefixes_that_cost_most_come_first_each_with_its_latest_request() -> None:
    prefixes = CostlyPrefixes()
    for number in range(12):
        for request_id in ("first", "second"):
            prefixes.add(paid(f"{number:x}", 16 * number, request_id))
    costliest = prefixes.costliest()
    assert [prefix.prefix for prefix in costliest] == list("ba98765432")
    assert costliest[0] == CostlyPrefix(
        prefix="b", tenant="t", num_tokens=64, recomputed_tokens=352, latest_request_id="second", num_requests=2
    )


def test_cheap_prefixes_are_forgotten_when_there_are_too_many() -> None:
    prefixes = CostlyPrefixes()
    for number in range(5 * MAX_PREFIXES):
        prefixes.add(paid(f"{number:x}", 1))
        prefixes.add(paid("dear", 100))
        assert len(prefixes) <= MAX_PREFIXES
    assert prefixes.costliest()[0].num_requests == 5 * MAX_PREFIXES
