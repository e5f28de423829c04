"""Bad words: every way in which tokens can spell them."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend

from pagedcore.text.bad_words import encode_bad_words
from pagedcore.text.chat_template import ChatTemplate
from pagedcore.text.tokenizer import Tokenizer
from support.small_tokenizers import make_byte_fallback, make_byte_level


def spelled(backend: Backend, words: list[str]) -> set[tuple[str | None, ...]]:
    sequences = encode_bad_words(Tokenizer(backend, {}, ChatTemplate({})), words)
    return {tuple(backend.id_to_token(token_id) for token_id in sequence) for sequence in sequences}


def test_a_word_is_banned_with_and_without_a_leading_space() -> None:
    assert spelled(make_byte_level(), ["bad"]) == {("bad",), ("Ġbad",)}


def test_a_sentencepiece_word_is_banned_inside_and_at_the_beginning_of_a_word() -> None:
    assert spelled(make_byte_fallback(), ["bad"]) >= {("bad",), ("▁bad",)}


def test_spaces_around_a_word_do_not_matter() -> None:
    assert spelled(make_byte_level(), [" bad "]) == spelled(make_byte_level(), ["bad"])


@pytest.mark.parametrize("make", [make_byte_level, make_byte_fallback])
def test_no_special_token_gets_into_a_banned_sequence(make: type[Backend]) -> None:
    assert not [s for s in spelled(make(), ["bad", "worlds"]) if "<s>" in s]


def test_nothing_is_banned_without_words() -> None:
    assert encode_bad_words(Tokenizer(make_byte_level(), {}, ChatTemplate({})), []) == ()
