"""Log probabilities in OpenAI's two forms, and the prompt's in a third one: what tokens look like, and where they stand."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from pagedcore.client import TextFront
from pagedcore.outputs import Logprob

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""

TokenLogprobs = Mapping[int, Logprob]


class TokenTexts:
    """Owns the texts of the tokens of one reply, each looked up once."""

    def __init__(self, text: TextFront | None, *, skip_special_tokens: bool) -> None:
        self._text = text
        self._skips = skip_special_tokens
        self.bytes_of = cache(self._bytes_of)
        self.shown = cache(self._shown)

    def name(self, token_id: int) -> str:
        r"""The token as text; a part of a character is written as "bytes:\xe2\x82"."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _bytes_of(self, token_id: int) -> bytes:
        """The token's bytes, which may be a part of a character."""
        return f"token_id:{token_id}".encode() if self._text is None else self._text.token_bytes(token_id)

    def _shown(self, token_id: int) -> bytes:
        """What the token adds to the reply's text: nothing if it is special and those are left out."""
        if self._text is None:
            return b""
        is_left_out = self._skips and not self._text.decode([token_id]) and self._text.decode([token_id], skip_special_tokens=False)
        return b"" if is_left_out else self.bytes_of(token_id)


class OffsetCounter:
    """Owns the position in a choice's text, in characters, before any stop string is cut off."""

    def __init__(self, texts: TokenTexts, start: int = 0) -> None:
        self._texts = texts
        self._position = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, token_ids: Iterable[int]) -> list[int]:
        """Where each token begins; moves on past them."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._position)
            self._position += len(self._decoder.decode(self._texts.shown(token_id)))
        return offsets


def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offsets: Sequence[int], num_top: int, texts: TokenTexts
) -> dict[str, object]:
    """The form of /v1/completions. An entry of None is a token that nothing predicted: the prompt's first one."""
    pairs = list(zip(token_ids, entries, strict=True))
    return {
        "tokens": list(map(texts.name, token_ids)),
        "token_logprobs": [None if entry is None else _finite(entry[token_id]) for token_id, entry in pairs],
        "top_logprobs": [None if entry is None else _top_by_name(token_id, entry, num_top, texts) for token_id, entry in pairs],
        "text_offset": list(offsets),
    }


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[TokenLogprobs], num_top: int, texts: TokenTexts) -> dict[str, object]:
    """The form of /v1/chat/completions."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = [_chat_token(other, logprob, texts) for other, logprob in _ranked(entry) if logprob.rank <= num_top]
        content.append({**_chat_token(token_id, entry[token_id], texts), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], texts: TokenTexts) -> list[dict[str, object] | None]:
    """One dict a prompt token, by token id; None for the first."""
    return [None if entry is None else {str(token_id): _plain(token_id, it, texts) for token_id, it in _ranked(entry)} for entry in entries]


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST_LOGPROB)


def _ranked(entry: TokenLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(entry.items(), key=lambda item: item[1].rank)


def _top_by_name(token_id: int, entry: TokenLogprobs, num_top: int, texts: TokenTexts) -> dict[str, float]:
    """The likeliest tokens and the token itself; of two tokens that look alike the likelier one stays."""
    top: dict[str, float] = {}
    for other, logprob in _ranked(entry):
        if logprob.rank <= num_top or other == token_id:
            top.setdefault(texts.name(other), _finite(logprob))
    return top


def _chat_token(token_id: int, logprob: Logprob, texts: TokenTexts) -> dict[str, object]:
    return {"token": texts.name(token_id), "logprob": _finite(logprob), "bytes": list(texts.bytes_of(token_id))}


def _plain(token_id: int, logprob: Logprob, texts: TokenTexts) -> dict[str, object]:
    return {"logprob": _finite(logprob), "rank": logprob.rank, "decoded_token": texts.name(token_id)}
