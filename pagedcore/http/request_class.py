"""The class of a request: what kind of traffic it is, as the `class` label on metrics."""

from __future__ import annotations

import re

from starlette.requests import Request

from pagedcore.errors import InvalidRequestError
from pagedcore.shown import shown

REQUEST_CLASS_HEADER = "X-Request-Class"
"""A header, so that a gateway may set it without reading the body. The first 16 classes have their own series, later ones are "other"."""

_VALID = re.compile(r"[\x20-\x7e]{1,64}")


def request_class_of(request: Request) -> str | None:
    """What the header says. Raises `InvalidRequestError` unless it is 1 to 64 printable ASCII characters."""
    given = request.headers.get(REQUEST_CLASS_HEADER)
    if given and not _VALID.fullmatch(given):
        message = f"{REQUEST_CLASS_HEADER} is {shown(given)} and must be 1 to 64 printable ASCII characters."
        raise InvalidRequestError(message, param=REQUEST_CLASS_HEADER)
    return given or None
