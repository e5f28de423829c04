"""Where a long text may be cut so that its parts, tokenized one by one, give the tokens of the whole.

One call over megabytes keeps the interpreter's lock while it hands its result over, and cannot be left early. Cuts are made
where no rule of the tokenizer looks across: before a space that follows other than white space, and after a lone line break.
Byte-level BPE has such places when its words are found by one of the patterns below; other tokenizers get no cuts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

PART_CHARS = 1 << 17
"""Characters of a part, at least: its tokens are handed over in a few milliseconds."""

_CUT = re.compile(r"(?<=\S)(?= )|(?<=\S\n)(?=\S)")
_SEARCH_CHARS = 1 << 14
"""Characters that are searched in one call, which holds the interpreter's lock."""

_ACROSS = re.compile(r"\S |\S\n\S")
"""What a token holds that may lie across a cut."""

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD_PATTERNS = frozenset(_LETTERS + digits + _REST for digits in (r"|\p{N}", r"|\p{N}{1,3}"))
"""Patterns, beside the one built into ByteLevel, none of whose words goes on after a place of `_CUT`: white space stands only at
the beginning of a word, or at its end as line breaks, and what is looked ahead at is white space only."""


def has_cuts(backend: Backend) -> bool:
    """Whether texts of this tokenizer may be cut."""
    from tokenizers.models import BPE

    model, normalizer = backend.model, _rules(backend.normalizer)
    return (
        isinstance(model, BPE)
        and not model.dropout
        and normalizer.get("type", "NFC") == "NFC"
        and _splits_at_cuts(_rules(backend.pre_tokenizer))
        and all(map(_stays_beside_cuts, backend.get_added_tokens_decoder().values()))
    )


def parts_of(text: str) -> Iterator[str]:
    """The text in order, in parts of at least `PART_CHARS` characters that end at cuts."""
    start = 0
    while start < len(text):
        end = _next_cut(text, start + PART_CHARS)
        yield text[start:end]
        start = end


def _next_cut(text: str, start: int) -> int:
    for at in range(start, len(text), _SEARCH_CHARS):
        found = _CUT.search(text, at, min(at + _SEARCH_CHARS + 1, len(text)))
        if found is not None:
            return found.start()
    return len(text)


def _rules(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as its file would have it; empty where there is none."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _splits_at_cuts(pre_tokenizer: dict[str, Any]) -> bool:
    *earlier, last = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return False
    if last["use_regex"]:
        return all(step["type"] == "Digits" for step in earlier)
    return len(earlier) == 1 and _is_known_split(earlier[0])


def _is_known_split(step: dict[str, Any]) -> bool:
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        return False
    return step["pattern"].get("Regex") in WORD_PATTERNS


def _stays_beside_cuts(token: AddedToken) -> bool:
    """A token that takes white space after it, or looks at its neighbours, would see the cut."""
    return not (token.rstrip or token.single_word or _ACROSS.search(token.content))
