"""Grammars over a small vocabulary: one token a byte, and an end."""

from __future__ import annotations

from collections.abc import Sequence

from pagedcore.grammar.grammars import Grammars
from pagedcore.grammar.matcher import Matcher
from pagedcore.structured_outputs import StructuredOutputsParams
from support.small_tokenizers import make_byte_level

BACKEND = make_byte_level()
VOCAB_SIZE = BACKEND.get_vocab_size()
EOS = BACKEND.token_to_id("</s>")


def make_grammars(vocab_size: int = VOCAB_SIZE, eos_token_ids: Sequence[int] = (EOS,)) -> Grammars:
    return Grammars(BACKEND.to_str, vocab_size, eos_token_ids)


def ids_of(text: str) -> list[int]:
    return BACKEND.encode(text, add_special_tokens=False).ids


def form(**fields: object) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)  # type: ignore[arg-type]


def allowed(matcher: Matcher) -> set[int]:
    """The tokens that its mask lets through."""
    mask = matcher.mask()
    return {token for token in range(8 * len(mask)) if mask[token // 8] >> (token % 8) & 1}


def texts(token_ids: set[int]) -> set[str]:
    return {BACKEND.id_to_token(token_id) for token_id in token_ids}


def accepts(grammars: Grammars, params: StructuredOutputsParams, text: str) -> bool:
    """Whether this text may be the whole output."""
    grammars.prepare(params)
    matcher = grammars.open(params, [])
    for token_id in [*ids_of(text), EOS]:
        if token_id not in allowed(matcher):
            return False
        grammars.advance([matcher], [token_id])
    return matcher.error is None
