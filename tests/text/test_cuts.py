"""Long texts are tokenized in parts, and have the tokens of the whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pagedcore.models.embedded import ensure_embedded_model
from pagedcore.text import cuts
from pagedcore.text import tokenizer as tokenizer_module
from pagedcore.text.chat_template import ChatTemplate
from pagedcore.text.cuts import WORD_PATTERNS, has_cuts, parts_of
from pagedcore.text.tokenizer import Tokenizer as TextTokenizer
from support.small_tokenizers import make_byte_fallback, make_metaspace, make_wordpiece

ByteLevel, Digits, Split = pre_tokenizers.ByteLevel, pre_tokenizers.Digits, pre_tokenizers.Split
PATTERNS = sorted(WORD_PATTERNS)

WORDS = [
    "a",
    "B",
    "é",
    "e\u0301",
    "\u0301",
    "好",
    "7",
    "42",
    "'s",
    ".",
    "...",
    "(",
    "The",
    " quick",
    "word\n",
    "<|im_start|>",
    "<|im_end|>",
]
SPACES = [" ", "  ", "\u00a0", "\u2028", "\n", "\n\n", "\r\n", "\t", "\x1c", "\x85"]


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    steps = [Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    return pre_tokenizers.Sequence(steps)


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "built in": lambda: ByteLevel(add_prefix_space=False),
    "digits first": lambda: pre_tokenizers.Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "one digit": lambda: split_by(PATTERNS[0]),
    "three digits": lambda: split_by(PATTERNS[1]),
}


@cache
def real_backend(kind: str) -> tuple[Tokenizer, TextTokenizer]:
    """The embedded model's merges, with words found in each of the ways that are known."""
    backend = Tokenizer.from_file(str(ensure_embedded_model() / "tokenizer.json"))
    backend.pre_tokenizer = PRE_TOKENIZERS[kind]()
    if "digit" in kind:
        backend.normalizer = normalizers.NFC()
    return backend, text_tokenizer(backend)


def small_backend(added: AddedToken | None = None) -> Tokenizer:
    """One token a byte, `<s>` before and `</s>` after."""
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    if added is not None:
        backend.add_tokens([added])
    return backend


def in_parts(monkeypatch: pytest.MonkeyPatch, num_chars: int) -> None:
    monkeypatch.setattr(cuts, "PART_CHARS", num_chars)
    monkeypatch.setattr(tokenizer_module, "PART_CHARS", num_chars)


def text_tokenizer(backend: Tokenizer) -> TextTokenizer:
    return TextTokenizer(backend, {}, ChatTemplate({}))


@pytest.mark.model
@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(chosen=st.lists(st.sampled_from(WORDS + SPACES), max_size=40), num_chars=st.integers(1, 6))
def test_a_text_in_parts_has_the_tokens_of_the_whole(kind: str, chosen: list[str], num_chars: int) -> None:
    (backend, tokenizer), text = real_backend(kind), "".join(chosen)
    assert has_cuts(backend)
    with pytest.MonkeyPatch.context() as monkeypatch:
        in_parts(monkeypatch, num_chars)
        assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("ab \n\t."), max_size=60), num_chars=st.integers(1, 8))
def test_parts_join_to_the_text_and_none_but_the_last_is_short(text: str, num_chars: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        in_parts(monkeypatch, num_chars)
        monkeypatch.setattr(cuts, "_SEARCH_CHARS", 2)
        parts = list(parts_of(text))
    assert "".join(parts) == text
    assert all(len(part) >= num_chars for part in parts[:-1])


def test_cuts_are_before_a_words_space_and_after_a_lone_line_break(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 1)
    assert list(parts_of("one two  three\nfour\n\nfive\n six")) == ["one", " two", "  three\n", "four\n\nfive\n six"]


def test_a_text_without_a_place_to_cut_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 4)
    monkeypatch.setattr(cuts, "_SEARCH_CHARS", 3)
    assert list(parts_of("a" * 50)) == ["a" * 50]


def test_special_tokens_are_added_once_around_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 4)
    backend = small_backend()
    ids = text_tokenizer(backend).encode("one two three four")
    assert ids == backend.encode("one two three four").ids
    assert (ids[0], ids[-1], ids.count(0), ids.count(1)) == (0, 1, 1, 1)


@pytest.mark.parametrize(
    "added",
    [
        AddedToken("<x>", rstrip=True),
        AddedToken("word", single_word=True),
        AddedToken("two words"),
        AddedToken("a\nb"),
    ],
    ids=["takes white space after it", "looks at its neighbours", "lies across a space", "lies across a line break"],
)
def test_an_added_token_that_would_see_a_cut_forbids_them(added: AddedToken) -> None:
    assert has_cuts(small_backend())
    assert not has_cuts(small_backend(added))


def with_pre_tokenizer(pre_tokenizer: pre_tokenizers.PreTokenizer | None) -> Tokenizer:
    backend = small_backend()
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    return backend


def with_normalizer() -> Tokenizer:
    backend = small_backend()
    backend.normalizer = normalizers.NFKC()
    return backend


def with_dropout() -> Tokenizer:
    backend = small_backend()
    backend.model.dropout = 0.1
    return backend


@pytest.mark.parametrize(
    "make",
    [
        make_byte_fallback,
        make_metaspace,
        make_wordpiece,
        with_normalizer,
        with_dropout,
        lambda: with_pre_tokenizer(ByteLevel(add_prefix_space=True)),
        lambda: with_pre_tokenizer(split_by(PATTERNS[0] + "|x y")),
        lambda: with_pre_tokenizer(pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), ByteLevel(add_prefix_space=False)])),
        lambda: with_pre_tokenizer(pre_tokenizers.Sequence([Split(Regex(PATTERNS[0]), "isolated"), Digits()])),
    ],
)
def test_a_tokenizer_whose_words_are_found_otherwise_has_no_cuts(make: Callable[[], Tokenizer]) -> None:
    assert not has_cuts(make())


def test_a_prompt_that_is_too_long_is_not_tokenized_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 10)
    tokenizer = text_tokenizer(small_backend())
    encode, seen = tokenizer._encode, []

    def noted(text: str, add_special_tokens: bool) -> list[int]:
        seen.append(text)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "_encode", noted)
    assert len(tokenizer.encode(" 123456789" * 6, add_special_tokens=False, max_prompt_tokens=15)) == 20
    assert seen == [" 123456789"] * 2


def test_a_prompt_of_just_the_limit_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts(monkeypatch, 10)
    tokenizer = text_tokenizer(small_backend())
    assert len(tokenizer.encode(" 123456789" * 6, add_special_tokens=False, max_prompt_tokens=60)) == 60
