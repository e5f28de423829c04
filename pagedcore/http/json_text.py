"""JSON both ways, with orjson where it is installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any, cast

from starlette.responses import Response

_orjson = importlib.import_module("orjson") if importlib.util.find_spec("orjson") else None


def dumps(value: object) -> bytes:
    """Compact UTF-8 JSON."""
    if _orjson is not None:
        return cast("bytes", _orjson.dumps(value))
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def json_reply(body: object, status_code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An HTTP answer."""
    return Response(dumps(body), status_code, headers, media_type="application/json")


def loads(raw: bytes) -> Any:
    """Parse JSON. Raises `ValueError` (or `RecursionError`) for what is not JSON, also for NaN and Infinity."""
    if _orjson is not None:
        return _orjson.loads(raw)
    value = json.loads(raw, parse_constant=int)  # int("NaN") is a ValueError: JSON has no such number
    if b"\\ud" in raw.lower():
        dumps(value)  # half a surrogate pair is not text: UnicodeEncodeError is a ValueError
    return value
