"""The body of a request: what it may call itself, and how large it may be.

A page of any web site can make a browser send a body here without asking, but none that calls itself JSON: for that the browser asks first.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request

from pagedcore.errors import RequestTooLargeError, UnsupportedFeatureError, UnsupportedMediaTypeError
from pagedcore.shown import shown

_UNDECLARED = ("", "application/x-www-form-urlencoded")
"""What programs send that say nothing of their JSON: the second is what `curl -d` adds."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises `UnsupportedMediaTypeError`, `UnsupportedFeatureError` for one that is packed, and `RequestTooLargeError`."""
    check_content_type(request.headers)
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedFeatureError(f"Content-Encoding {shown(encoding)} is not offered; send plain JSON.", param="Content-Encoding")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise RequestTooLargeError(f"The body is larger than {max_bytes} bytes, the server's max_request_bytes; send less.")
    return bytes(body)


def check_content_type(headers: Headers) -> None:
    """Raises `UnsupportedMediaTypeError` unless a body with these headers is JSON, or may be and comes from no web page.

    A browser sends Origin with the body of every page.
    """
    media_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media_type == "application/json" or media_type.endswith("+json"):
        return
    if media_type not in _UNDECLARED:
        message = f"Content-Type {shown(media_type)} is not JSON; send the body as JSON, with Content-Type: application/json."
        raise UnsupportedMediaTypeError(message, param="Content-Type")
    if "Origin" in headers:
        message = f"A web page, of {shown(headers['Origin'])}, must say that the body is JSON; add Content-Type: application/json."
        raise UnsupportedMediaTypeError(message, param="Content-Type")
