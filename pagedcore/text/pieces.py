"""What each token adds to a text, as bytes: decoding is then joining, in one go or token by token."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EACH_BYTE = "pagedcore.replace_each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError), error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


@dataclass(frozen=True, slots=True)
class PieceRules:
    """How a tokenizer's decoder turns tokens into text, for the decoders that work token by token.

    Byte-level BPE: every token is bytes, and each broken character is one U+FFFD. Byte fallback: tokens are text but
    for the `<0xNN>` ones, and each byte of a broken character is one U+FFFD (characters beside it are kept).
    """

    to_bytes: Callable[[str], bytes]
    first_to_bytes: Callable[[str], bytes]
    """The same for the first token of a text (Metaspace drops its marks there)."""
    errors: str = "replace"
    strip: str = " "
    strip_left: int = 0
    """At most this many `strip` characters are dropped at the beginning of the text."""


def piece_rules(backend: Backend) -> PieceRules | None:
    """The rules of a tokenizer, or None when its decoder looks at several tokens at once."""
    decoder = json.loads(backend.to_str())["decoder"] if backend.decoder is not None else None
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRules(_byte_level, _byte_level)
    if kinds == ["Metaspace"]:
        return _metaspace(steps[0])
    return _fallback(steps, kinds)


def _byte_level_alphabet() -> dict[str, int]:
    """Printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an added token, written as it is
        return token.encode()


def _metaspace(step: dict[str, Any]) -> PieceRules:
    mark = step["replacement"]

    def middle(token: str) -> bytes:
        return token.replace(mark, " ").encode()

    def first(token: str) -> bytes:
        return token.replace(mark, "").encode()

    return PieceRules(middle, middle if step.get("prepend_scheme") == "never" else first)


def _fallback(steps: list[dict[str, Any]], kinds: list[str]) -> PieceRules | None:
    """Replace*, ByteFallback, Fuse and perhaps a Strip of the fused text's beginning."""
    num_replaces = next((i for i, kind in enumerate(kinds) if kind != "Replace"), len(kinds))
    replaces = [(step["pattern"].get("String"), step["content"]) for step in steps[:num_replaces]]
    tail = kinds[num_replaces:]
    if tail not in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]) or any(old is None for old, _ in replaces):
        return None
    strip: dict[str, Any] = steps[-1] if tail[-1] == "Strip" else {"content": " ", "start": 0, "stop": 0}
    if strip["stop"]:
        return None

    def to_bytes(token: str) -> bytes:
        for old, new in replaces:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.encode()

    return PieceRules(to_bytes, to_bytes, _EACH_BYTE, strip["content"], strip["start"])


class Pieces:
    """Owns the tables of what tokens add to a text, filled as ids are met. Thread-safe: an entry is always computed alike."""

    def __init__(self, backend: Backend, rules: PieceRules) -> None:
        self.rules = rules
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}

    def has(self, token_id: int) -> bool:
        return self._backend.id_to_token(token_id) is not None

    def get(self, token_id: int) -> bytes:
        """The bytes of one token inside a text; none for an id that the tokenizer does not have."""
        piece = self._bytes.get(token_id)
        if piece is None:
            token = self._backend.id_to_token(token_id)
            piece = self._bytes[token_id] = b"" if token is None else self.rules.to_bytes(token)
        return piece

    def whole_text(self, token_id: int) -> str | None:
        """The text of one token between whole characters, or None when it holds a part of a character."""
        try:
            return self._texts[token_id]
        except KeyError:
            text = self._texts[token_id] = _decode_or_none(self.get(token_id))
            return text

    def first(self, token_id: int) -> bytes:
        """The bytes of one token at the beginning of a text."""
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self.rules.first_to_bytes(token)


def _decode_or_none(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
