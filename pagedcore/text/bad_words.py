"""Bad words as the token sequences that would spell them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedcore.text.tokenizer import Tokenizer

_ANCHOR = "\n"
"""A text that no token spans together with a word, to see how a word is spelled inside a text."""


def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Every token sequence for each word, at the beginning and inside of a text, with and without a leading space."""
    sequences = dict.fromkeys(sequence for word in words for sequence in _spellings(tokenizer, word.strip()))
    return tuple(sequence for sequence in sequences if sequence)


def _spellings(tokenizer: Tokenizer, word: str) -> Iterator[tuple[int, ...]]:
    anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
    for text in (word, f" {word}"):
        yield tuple(tokenizer.encode(text, add_special_tokens=False))
        inside = tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
        if inside[: len(anchor)] == anchor:
            yield tuple(inside[len(anchor) :])
