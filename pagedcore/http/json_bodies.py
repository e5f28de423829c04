"""A body as a JSON object, and what pydantic finds wrong with one as a sentence that names the field."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pagedcore.errors import InvalidRequestError
from pagedcore.http.json_text import loads
from pagedcore.shown import shown

if TYPE_CHECKING:
    from pydantic import ValidationError

_LONGEST_NAME = 64
"""Characters of a name that a client made up, which a message repeats."""

_SIZE = re.compile(r"\w+ should have at most (\d+) (\w+).*")
"""How pydantic says that something is too long."""

_ABOUT_NAMES = {
    "missing": ("is missing; this request needs it.", "missing_field"),
    "extra_forbidden": ("is not a field of this request; leave it out.", "unknown_field"),
}
"""What pydantic finds wrong with a name, not with a value -> the rest of the sentence, and its code."""


def json_object(raw: bytes) -> dict[str, Any]:
    """Raises `InvalidRequestError` for what is none."""
    try:
        data = loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(data, dict):
        raise InvalidRequestError(f"The body must be a JSON object, got {shown(data)}.", code="invalid_json")
    return data


def invalid_field(error: ValidationError) -> InvalidRequestError:
    """One sentence for the first field that is wrong; a field of several types says what each would have wanted."""
    problems = error.errors(include_url=False, include_context=False)
    first = problems[0]["loc"][0]
    same = [problem for problem in problems if problem["loc"][0] == first]
    if same[0]["type"] in _ABOUT_NAMES:
        where, (says, code) = _path(same[0]["loc"]), _ABOUT_NAMES[same[0]["type"]]
        return InvalidRequestError(f"{where} {says}", param=where, code=code)
    where = _path(same[0]["loc"] if len(same) == 1 else (first,))  # of several types each has a path of its own
    wanted = " or ".join(dict.fromkeys(_SIZE.sub(r"at most \1 \2 long", one["msg"].removeprefix("Input should be ")) for one in same))
    return InvalidRequestError(f"{where} is wrong: it should be {wanted}, got {shown(same[0]['input'])}.", param=where)


def _path(loc: Iterable[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part[:_LONGEST_NAME]}" for part in loc).removeprefix(".")
