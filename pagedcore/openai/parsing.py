"""Bytes of a request to a checked body. Nothing is ignored: what is unknown or not offered is refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, TypeVar

from pydantic import ValidationError

from pagedcore.errors import InvalidRequestError
from pagedcore.http.json_text import loads
from pagedcore.openai.bodies import Body
from pagedcore.shown import shown
from pagedcore.tools.fields import check_fields

B = TypeVar("B", bound=Body)

_SIZE = re.compile(r"\w+ should have at most (\d+) (\w+).*")
"""How pydantic says that something is too long."""


def parse_body(model: type[B], raw: bytes, ignored_fields: Collection[str] = ()) -> B:
    """Check a body, without the fields to ignore. Raises `InvalidRequestError` naming the field, or `UnsupportedFeatureError`."""
    data = _json_object(raw)
    ignored = [name for name in ignored_fields if data.pop(name, None) is not None]
    check_fields(data, known=model.model_fields, not_offered=model.not_offered)
    given = {name: value for name, value in data.items() if value is not None and name in model.model_fields}
    try:
        return model.model_validate(given).leaving_out(ignored)
    except ValidationError as error:
        raise _invalid_field(error) from None


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        data = loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(data, dict):
        raise InvalidRequestError(f"The body must be a JSON object, got {shown(data)}.", code="invalid_json")
    return data


def _invalid_field(error: ValidationError) -> InvalidRequestError:
    """One sentence for the first field that is wrong; a field of several types says what each would have wanted."""
    problems = error.errors(include_url=False, include_context=False)
    first = str(problems[0]["loc"][0])
    same = [problem for problem in problems if str(problem["loc"][0]) == first]
    if same[0]["type"] == "missing" and len(same[0]["loc"]) == 1:
        return InvalidRequestError(f"{first} is missing; this request needs it.", param=first, code="missing_field")
    wanted = " or ".join(dict.fromkeys(_SIZE.sub(r"at most \1 \2 long", one["msg"].removeprefix("Input should be ")) for one in same))
    return InvalidRequestError(f"{first} is wrong: it should be {wanted}, got {shown(same[0]['input'])}.", param=first)
