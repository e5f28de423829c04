"""Token ids to text, as they come: what is given out is never taken back and never a broken character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pagedcore.text.pieces import Pieces
    from pagedcore.text.tokenizer import Tokenizer

_BROKEN = "\ufffd"
_CONTEXT_TOKENS = 8
_MAX_HELD_TOKENS = 32
"""More tokens than this without a whole character are not a character in the making."""


class TextStream(Protocol):
    """Turns the token ids of one text into its pieces."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class Detokenizer:
    """Owns the unfinished character of one choice.

    Only output ids are pushed, so the prompt cannot leak into the text. All texts returned, joined, are
    `tokenizer.decode(all ids)`. Characters that are still incomplete at the end become U+FFFD in `finish`.
    """

    __slots__ = ("finish", "push")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        stream: TextStream
        if tokenizer.pieces is None:
            stream = _WindowStream(tokenizer, skip_special_tokens)
        else:
            stream = _PieceStream(tokenizer.pieces, skipped)
        self.push = stream.push
        """push(token_ids) -> the text that became certain."""
        self.finish = stream.finish
        """finish() -> the rest of the text."""


class _PieceStream:
    """Joins the bytes of tokens and decodes them incrementally: constant time a token."""

    __slots__ = ("_decoder", "_is_begun", "_is_between", "_pieces", "_skipped", "_strip_left")

    def __init__(self, pieces: Pieces, skipped: frozenset[int]) -> None:
        self._pieces = pieces
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(pieces.rules.errors)
        self._strip_left = pieces.rules.strip_left
        self._is_begun = False
        self._is_between = False
        """Between two whole characters, past the beginning: the text of the next token may come from the table."""

    def push(self, token_ids: Sequence[int]) -> str:
        if self._is_between and len(token_ids) == 1:
            token_id = token_ids[0]
            text = "" if token_id in self._skipped else self._pieces.whole_text(token_id)
            if text is not None:
                return text
        return self._push(token_ids) if self._is_begun else self._begin(token_ids)

    def finish(self) -> str:
        return self._strip(self._decoder.decode(b"", True))

    def _push(self, token_ids: Sequence[int]) -> str:
        skipped, get = self._skipped, self._pieces.get
        return self._decode(b"".join([get(token_id) for token_id in token_ids if token_id not in skipped]))

    def _begin(self, token_ids: Sequence[int]) -> str:
        """The first token that has text is decoded by its own rule."""
        for i, token_id in enumerate(token_ids):
            if token_id not in self._skipped and self._pieces.has(token_id):
                self._is_begun = True
                return self._decode(self._pieces.first(token_id)) + self._push(token_ids[i + 1 :])
        return ""

    def _decode(self, piece: bytes) -> str:
        text = self._strip(self._decoder.decode(piece))
        self._is_between = not self._strip_left and not self._decoder.getstate()[0]
        return text

    def _strip(self, text: str) -> str:
        if not self._strip_left:
            return text
        strip = self._pieces.rules.strip
        start = 0
        while start < len(text) and self._strip_left and text[start] == strip:
            start += 1
            self._strip_left -= 1
        if start < len(text):
            self._strip_left = 0
        return text[start:]


class _WindowStream:
    """For decoders that look at several tokens: decodes a short window again for each push, and the whole once at the end."""

    __slots__ = ("_emitted", "_ids", "_skip", "_start", "_tokenizer", "_window_text")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0
        self._window_text = ""
        """The part of the window's text that has been given out."""
        self._emitted = 0

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(token_ids)
        text = self._decode(self._start)
        is_certain = not text.endswith(_BROKEN) or len(self._ids) - self._start > _MAX_HELD_TOKENS
        if not is_certain or not text.startswith(self._window_text):
            return ""
        new = text[len(self._window_text) :]
        self._emitted += len(new)
        self._start = max(0, len(self._ids) - _CONTEXT_TOKENS)
        self._window_text = self._decode(self._start)
        return new

    def finish(self) -> str:
        return self._decode(0)[self._emitted :]

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=self._skip)
