"""Bytes of a request to a checked body. Nothing is ignored: what is unknown or not offered is refused by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from pydantic import ValidationError

from pagedcore.http.json_bodies import invalid_field, json_object
from pagedcore.openai.bodies import Body
from pagedcore.tools.fields import check_fields

B = TypeVar("B", bound=Body)


def parse_body(model: type[B], raw: bytes, ignored_fields: Collection[str] = ()) -> B:
    """Check a body, without the fields to ignore. Raises `InvalidRequestError` naming the field, or `UnsupportedFeatureError`."""
    data = json_object(raw)
    ignored = [name for name in ignored_fields if data.pop(name, None) is not None]
    check_fields(data, known=model.model_fields, not_offered=model.not_offered)
    given = {name: value for name, value in data.items() if value is not None and name in model.model_fields}
    try:
        return model.model_validate(given).leaving_out(ignored)
    except ValidationError as error:
        raise invalid_field(error) from None
