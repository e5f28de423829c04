"""What an output says before its grammar holds: reasoning, which is free up to the text that ends it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING

from pagedcore.grammar.compiling import LIMITS, library
from pagedcore.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WHITESPACE = b" \t\n\r"
"""May share a token with the end of the reasoning; no grammar sees it, and no answer shows it."""


class ReasoningEnd:
    """The text that ends reasoning, in the tokens of one vocabulary; immutable.

    It may be one token or be spelled. A token that holds the last of it and then a part of the answer would bring what no grammar
    has seen, so such tokens are masked where they would end the reasoning, and only there.
    """

    def __init__(self, text: str, tokens: LLTokenizer) -> None:
        self._text = text.encode()
        self._tokens = tokens
        num_words = -(-tokens.vocab_size // 32)
        self._free = memoryview(b"\xff" * (4 * num_words))
        self._overrunning = self._find_overrunning()
        self._masks: dict[tuple[int, ...], memoryview] = {}
        """Bytes of the text that may be missing -> the mask there; few, and some forbid half the vocabulary."""

    def after(self, said: bytes, token_id: int) -> bytes | None:
        """What has to be kept in mind of a reasoning that said this and now a token; None where it is over."""
        said += self._tokens.decode_bytes([token_id])
        if self._text in said:
            return None
        return said[max(0, len(said) - len(self._text) + 1) :]

    def mask(self, said: bytes) -> memoryview:
        """The tokens that may come next: one bit a token, lowest first."""
        size = len(self._text)
        begun = tuple(missing for missing in self._overrunning if said.endswith(self._text[: size - missing]))
        if begun not in self._masks:
            self._masks[begun] = self._mask_without(begun)
        return self._masks[begun]

    def _mask_without(self, begun: tuple[int, ...]) -> memoryview:
        mask = bytearray(self._free)
        for token_id in (token_id for missing in begun for token_id in self._overrunning[missing]):
            mask[token_id // 8] &= ~(1 << token_id % 8)
        return memoryview(mask)

    def _find_overrunning(self) -> dict[int, list[int]]:
        """Bytes of the text that are still missing -> tokens with these and more than whitespace after them."""
        found: dict[int, list[int]] = defaultdict(list)
        text, size, last = self._text, len(self._text), self._text[-1:]
        for token_id in range(self._tokens.vocab_size):
            said = self._tokens.decode_bytes([token_id])
            if last not in said[:-1]:
                continue
            for missing in range(1, min(size, len(said))):
                if said.startswith(text[size - missing :]) and said[missing:].strip(WHITESPACE):
                    found[missing].append(token_id)
            if said.partition(text)[2].strip(WHITESPACE):
                found[size].append(token_id)
        return dict(found)


class Reasoning:
    """Owns where one output stands before its grammar holds: whether it reasons, and the last of what it said then.

    Where the output itself opens the reasoning, its first tokens decide: those of the opening, or those of the grammar.
    """

    def __init__(self, end: ReasoningEnd, opening: LLMatcher | None) -> None:
        """`opening` follows the text that opens the reasoning; None where it is open."""
        self._end = end
        self._opening = opening
        self._undecided: list[int] = []
        """Tokens that may become the opening."""
        self._said = b""

    def take(self, token_id: int) -> list[int] | None:
        """Take the next token. Where the grammar holds from now on, the tokens that are the grammar's; else None."""
        if self._opening is None:
            said = self._end.after(self._said, token_id)
            self._said = said or b""
            return [] if said is None else None
        self._undecided.append(token_id)
        if not self._opening.try_consume_tokens([token_id]):
            return self._undecided
        if self._opening.is_accepting():
            self._opening = None
        return None

    def mask(self, grammar: LLMatcher) -> memoryview:
        """The tokens that may come next; `grammar` is at its beginning, and stays there."""
        if self._opening is None:
            return self._end.mask(self._said)
        opened = self._opening.compute_bitmask()
        begun = grammar.deep_copy()
        if begun.try_consume_tokens(self._undecided) < len(self._undecided):
            return memoryview(opened)
        both = int.from_bytes(opened, "little") | int.from_bytes(begun.compute_bitmask(), "little")
        return memoryview(both.to_bytes(len(opened), "little"))


def reasoning_of(params: StructuredOutputsParams, end: ReasoningEnd, tokens: LLTokenizer) -> Reasoning:
    """Of an output at its beginning."""
    if params.reasoning_start is None:
        return Reasoning(end, None)
    text = "start: " + _opening(params.reasoning_start, tokens)
    return Reasoning(end, library().LLMatcher(tokens, text, log_level=0, limits=library().LLParserLimits(**LIMITS)))


def _opening(text: str, tokens: LLTokenizer) -> str:
    """The text in Lark form. A special token in it has to be named by its id: no literal matches one."""
    token_ids = tokens.tokenize_str(text)
    if len(token_ids) == 1:
        return f"<[{token_ids[0]}]>"
    parts, rest = list[str](), text
    for token_id in filter(tokens.is_special_token, token_ids):
        before, _, rest = rest.partition(tokens.decode_str([token_id]))
        parts += [json.dumps(before), f"<[{token_id}]>"]
    return " ".join([*parts, json.dumps(rest)])
