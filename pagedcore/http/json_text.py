"""JSON both ways, by msgspec."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import msgspec
from starlette.responses import Response

PIECE_BYTES = 1 << 16
"""JSON that is parsed in one call, at most, but for a string."""

dumps = msgspec.json.Encoder().encode
"""dumps(value) -> compact UTF-8 JSON. Infinity and NaN, which JSON does not have, become null."""


def json_reply(body: object, status_code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An HTTP answer."""
    return Response(dumps(body), status_code, headers, media_type="application/json")


def loads(raw: bytes) -> Any:
    """Parse JSON. Raises `ValueError` (or `RecursionError`) for what is not JSON, also for NaN and Infinity.

    One call of the parser holds the interpreter's lock; large fields of an object are parsed in pieces, between which others run.
    """
    try:
        if len(raw) <= PIECE_BYTES or raw.lstrip()[:1] != b"{":
            return msgspec.json.decode(raw)
        return {name: _field(value) for name, value in _fields_of(raw).items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None


def _field(value: msgspec.Raw) -> Any:
    text = bytes(value)
    if len(text) <= PIECE_BYTES or not text.startswith(b"["):
        return msgspec.json.decode(text)
    try:
        return list(chain.from_iterable(map(_integers, _pieces(text))))
    except msgspec.DecodeError:  # no list of integers
        return [msgspec.json.decode(item) for item in _items_of(text)]


def _pieces(text: bytes) -> Iterator[bytes]:
    """A list's text, cut at commas: each piece is a list if the items are no strings and no containers."""
    start, end = 1, len(text) - 1
    while start <= end:
        comma = text.find(b",", start + PIECE_BYTES, end)
        stop = end if comma < 0 else comma
        yield b"[%b]" % text[start:stop]
        start = stop + 1


_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_items_of = msgspec.json.Decoder(list[msgspec.Raw]).decode
_integers = msgspec.json.Decoder(list[int]).decode
