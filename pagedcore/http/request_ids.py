"""The id of a request: the caller's X-Request-Id or a new one, the same in the reply, the log and the engine."""

from __future__ import annotations

import re
import uuid
from contextlib import suppress

from starlette.requests import Request

from pagedcore.errors import InvalidRequestError
from pagedcore.shown import shown

REQUEST_ID_HEADER = "X-Request-Id"

_VALID = re.compile(r"[\x20-\x7e]{1,128}")


def checked_request_id(value: str, *, param: str) -> str:
    """The id as given. Raises `InvalidRequestError` unless it is 1 to 128 printable ASCII characters."""
    if not _VALID.fullmatch(value):
        raise InvalidRequestError(f"{param} is {shown(value)} and must be 1 to 128 printable ASCII characters.", param=param)
    return value


def assign_request_id(request: Request) -> None:
    """Give a request its id; from then on `request_id_of` knows it. Raises `InvalidRequestError` for a malformed header."""
    request.state.request_id = f"req-{uuid.uuid4().hex}"
    given = request.headers.get(REQUEST_ID_HEADER)
    if given:
        request.state.request_id = checked_request_id(given, param=REQUEST_ID_HEADER)


def adopt_request_id(request: Request, body_request_id: str | None) -> str:
    """The request's id, taken from the body if it names one. Raises `InvalidRequestError` when header and body differ."""
    if body_request_id is not None:
        body_id = checked_request_id(body_request_id, param="request_id")
        if request.headers.get(REQUEST_ID_HEADER, body_id) != body_id:
            raise InvalidRequestError(f"request_id and {REQUEST_ID_HEADER} differ; give one of them.", param="request_id")
        request.state.request_id = body_id
    return request_id_of(request)


def request_id_of(request: Request) -> str:
    """The id given by `assign_request_id`; a valid one of the header, or a new one, where no route of ours was reached."""
    if not hasattr(request.state, "request_id"):
        with suppress(InvalidRequestError):  # a malformed header: the new id stands
            assign_request_id(request)
    return str(request.state.request_id)
