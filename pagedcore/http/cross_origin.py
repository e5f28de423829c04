"""CORS: which web pages of other origins may read what this server answers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response

from pagedcore.errors import ConfigError, InvalidRequestError
from pagedcore.shown import shown

if TYPE_CHECKING:
    from fastapi import APIRouter

ANY = "*"
METHODS = "GET, HEAD, POST"
PREFLIGHT_MAX_AGE_S = 600
EXPOSED_HEADERS = "Retry-After, X-Ignored-Fields, X-Request-Id"
"""What a page may read beside the few headers that browsers always show it."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*\s]+")
_WITH_DEFAULT_PORT = re.compile(r"http://.*:80|https://.*:443")

P = ParamSpec("P")
Answer = Callable[Concatenate[Request, P], Awaitable[Response]]


def check_origins(origins: object) -> None:
    """Raises `ConfigError` for what is no tuple of origins, and for what no browser sends as an Origin: it would never match."""
    if not isinstance(origins, tuple):
        raise ConfigError(f"cors_origins is {shown(origins)} and must be a tuple of origins, such as ('https://example.org',), or ('*',).")
    if ANY in origins and len(origins) > 1:
        raise ConfigError("cors_origins holds '*', which is every origin, and others beside it; give '*' alone, or leave it out.")
    for origin in origins:
        if origin != ANY:
            _check_origin(origin)


def _check_origin(origin: object) -> None:
    text = origin if isinstance(origin, str) else ""
    is_origin = _ORIGIN.fullmatch(text) and text == text.lower() and not _WITH_DEFAULT_PORT.fullmatch(text)
    if not is_origin:
        raise ConfigError(
            f"cors_origins holds {shown(origin)}; an origin is scheme://host or scheme://host:port in lower case, without a path, a final "
            "slash, wildcards or the scheme's own port, such as https://example.org."
        )


class CrossOrigin:
    """Owns the list of origins; with none it changes nothing.

    The headers are put on answers before these are sent, so that a stream's events pass no layer more.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origins)
        self.is_on = bool(self._origins)

    def headers_for(self, request_headers: Headers) -> dict[str, str]:
        """What an answer to a request with these headers says."""
        if ANY in self._origins:
            return {"Access-Control-Allow-Origin": ANY, "Access-Control-Expose-Headers": EXPOSED_HEADERS}
        if not self.is_on:
            return {}
        origin = request_headers.get("Origin")
        if origin not in self._origins:
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Credentials": "true",
            "Access-Control-Expose-Headers": EXPOSED_HEADERS,
            "Vary": "Origin",
        }

    def mark(self, request: Request, response: Response) -> Response:
        """The response, with those headers."""
        add_headers(response.headers, self.headers_for(request.headers))
        return response

    def marking(self, answer: Answer[P]) -> Answer[P]:
        """A function that answers as `answer` does, with those headers."""

        async def marked(request: Request, *args: P.args, **kwargs: P.kwargs) -> Response:
            return self.mark(request, await answer(request, *args, **kwargs))

        return marked if self.is_on else answer

    async def preflight(self, request: Request) -> Response:
        """The answer to a browser that asks whether a page may send a request; no key comes with the question.

        Raises `InvalidRequestError` for an origin that is not in the list.
        """
        origin = request.headers.get("Origin")
        if not {origin, ANY} & self._origins:
            raise InvalidRequestError(
                f"The origin {shown(origin)} is not in this server's cors_origins.", param="Origin", code="unknown_origin"
            )
        headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(PREFLIGHT_MAX_AGE_S)}
        asked = request.headers.get("Access-Control-Request-Headers")
        if asked:  # "*" would leave out Authorization
            headers |= {"Access-Control-Allow-Headers": asked, "Vary": "Access-Control-Request-Headers"}
        return Response(status_code=204, headers=headers)


def add_headers(headers: MutableHeaders, more: dict[str, str]) -> None:
    """Set them, but keep what Vary said before."""
    for name, value in more.items():
        headers[name] = f"{headers[name]}, {value}" if name == "Vary" and name in headers else value


def add_preflights(router: APIRouter, cross_origin: CrossOrigin) -> None:
    """Answer OPTIONS on the path of each route that is there."""
    for path in dict.fromkeys(route.path for route in router.routes):  # type: ignore[attr-defined]
        router.options(path, include_in_schema=False)(cross_origin.preflight)
