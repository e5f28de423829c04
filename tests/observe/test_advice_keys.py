"""Keys of prefixes: the same where, and only where, the engine would share."""

from __future__ import annotations

import pytest

from pagedcore.advice import prefix_keys
from pagedcore.advice.prefix_keys import KEY_SPACE, PrefixKeys
from pagedcore.advice.sampling import highest_level, sample
from pagedcore.core.block_hash import make_domain

DOMAIN = make_domain(None, None)
PROMPT = list(range(100, 121))


def test_a_key_depends_on_all_tokens_before_its_end() -> None:
    keys = PrefixKeys(8)
    assert len(keys.keys_of(DOMAIN, PROMPT).keys) == 2
    same, other = keys.keys_of(DOMAIN, PROMPT[:16]), keys.keys_of(DOMAIN, [*PROMPT[:8], 0, *PROMPT[9:16]])
    assert same.keys == keys.keys_of(DOMAIN, PROMPT).keys
    assert (same.keys[0] == other.keys[0], same.keys[1] == other.keys[1]) == (True, False)
    assert keys.keys_of(DOMAIN, [0, *PROMPT[1:16]]).keys[1] != same.keys[1]


def test_tenants_and_salts_share_no_key() -> None:
    keys = PrefixKeys(8)
    domains = [make_domain(salt, tenant) for salt in (None, "", "s") for tenant in (None, "", "t")]
    found = {key for domain in domains for key in keys.keys_of(domain, PROMPT).keys}
    assert len(found) == 2 * len(domains)


def test_the_next_turn_of_a_conversation_finds_the_answer_under_its_keys() -> None:
    keys = PrefixKeys(8)
    first = keys.keys_of(DOMAIN, PROMPT)
    answer = keys.answer_keys(first, first.answer_seed("r"), 36)
    keys.remember(first, first.answer_seed("r"), 36)
    assert len(answer) == 2
    second = keys.keys_of(DOMAIN, PROMPT + list(range(19)))
    assert second.keys[:4] == first.keys + answer
    assert second.keys[4] != keys.keys_of(DOMAIN, PROMPT + list(range(18))).keys[-1]


def test_a_prompt_that_leaves_the_earlier_one_early_finds_no_answer() -> None:
    keys = PrefixKeys(8)
    first = keys.keys_of(DOMAIN, PROMPT)
    keys.remember(first, first.answer_seed("r"), 36)
    other = [*PROMPT[:20], 7, *range(19)]
    assert keys.keys_of(DOMAIN, other).keys == PrefixKeys(8).keys_of(DOMAIN, other).keys


def test_answers_differ_by_request_unless_both_are_greedy() -> None:
    keys = PrefixKeys(8)
    prompt = keys.keys_of(DOMAIN, PROMPT)
    assert prompt.answer_seed("a") != prompt.answer_seed("b")
    assert prompt.answer_seed(None) == keys.keys_of(DOMAIN, PROMPT).answer_seed(None)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_keys, "MAX_ENDS", 10)
    monkeypatch.setattr(prefix_keys, "MAX_ENDS_A_PLACE", 3)
    keys = PrefixKeys(8)
    for number in range(40):
        keys.remember(keys.keys_of(DOMAIN, [number // 10, *PROMPT]), number, 30)
        keys.remember(keys.keys_of(DOMAIN, [*PROMPT[:16], number]), number, 30)
    assert len(keys._ends) <= 10
    assert max(len(ends) for ends in keys._ends.values()) == 3


def test_a_prompt_shorter_than_a_granule_has_no_key_and_is_not_remembered() -> None:
    keys = PrefixKeys(8)
    prompt = keys.keys_of(DOMAIN, [1, 2])
    keys.remember(prompt, 0, 30)
    assert (prompt.keys, len(keys._ends)) == ([], 0)


def test_a_sample_is_even_and_each_level_halves_the_one_before() -> None:
    keys = [key for start in range(4000) for key in PrefixKeys(8).keys_of(DOMAIN, range(start, start + 8)).keys]
    samples = [set(sample(keys, level)) for level in range(4)]
    assert [len(chosen) for chosen in samples] == [4000, *(pytest.approx(4000 / 2**level, rel=0.1) for level in (1, 2, 3))]
    assert samples[3] < samples[2] < samples[1] < samples[0]


def test_a_block_is_in_the_samples_up_to_its_highest_level() -> None:
    for key in (KEY_SPACE - 1, KEY_SPACE // 2 - 1, 5 * KEY_SPACE + 1000):
        levels = [level for level in range(25) if sample([key], level)]
        assert levels[-1] == min(highest_level(key), 24)
        assert levels == list(range(len(levels)))
