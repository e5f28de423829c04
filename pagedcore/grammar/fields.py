"""The form of an answer in the words of a request: OpenAI's `response_format`, `structured_outputs`, and the older `guided_*`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from pagedcore.errors import InvalidRequestError, UnsupportedFeatureError
from pagedcore.shown import shown
from pagedcore.structured_outputs import StructuredOutputsParams
from pagedcore.tools.fields import check_fields

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""Older field -> what `structured_outputs` calls it."""

FIELDS = ("response_format", "structured_outputs", *GUIDED)

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def read_structured(fields: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The form that a request asks for in any of `FIELDS`; None for free text.

    Raises `InvalidRequestError` naming the field, also where two fields ask for something.
    """
    found = {name: params for name in FIELDS if fields.get(name) is not None and (params := _read(name, fields[name])) is not None}
    if len(found) > 1:
        raise InvalidRequestError(f"{' and '.join(found)} each ask for a form of the answer; give one of them.", param=list(found)[1])
    return next(iter(found.values()), None)


def _read(name: str, value: Any) -> StructuredOutputsParams | None:
    if name == "response_format":
        return _response_format(value)
    try:
        params = StructuredOutputsParams.of({GUIDED[name]: value} if name in GUIDED else value)
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error), param=name) from None
    return None if params is None else dataclasses.replace(params, field=name)


def _response_format(value: Mapping[str, Any]) -> StructuredOutputsParams | None:
    kind = value.get("type")
    if kind in ("text", "json_object"):
        check_fields(value, known=("type",), not_offered={"json_schema": ()}, where="response_format.")
        return None if kind == "text" else StructuredOutputsParams(json_object=True, field="response_format")
    if kind == "json_schema":
        check_fields(value, known=("type", "json_schema"), not_offered={}, where="response_format.")
        return StructuredOutputsParams(json=_schema(value.get("json_schema")), field="response_format")
    if kind in ("grammar", "regex", "structural_tag", "python"):
        raise UnsupportedFeatureError(
            f"response_format.type={kind!r} is not offered by this server; use structured_outputs.", param="response_format.type"
        )
    message = f"response_format.type is {shown(kind)} and must be text, json_object or json_schema."
    raise InvalidRequestError(message, param="response_format.type")


def _schema(value: object) -> Mapping[str, Any]:
    where = "response_format.json_schema"
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{where} is {shown(value)} and must be an object with a name and a schema.", param=where)
    name, schema = value.get("name"), value.get("schema")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"{where}.name is {shown(name)} and must be 1 to 64 letters, digits, underscores or dashes."
        raise InvalidRequestError(message, param=f"{where}.name")
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{where}.schema is {shown(schema)} and must be a JSON schema, an object.", param=f"{where}.schema")
    check_fields(value, known=("name", "schema", "strict", "description"), not_offered={}, where=f"{where}.")
    return schema
