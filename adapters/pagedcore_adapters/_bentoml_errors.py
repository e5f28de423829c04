"""Errors of the native BentoML methods as HTTP answers: the bodies and headers of OpenAI's routes, beside them in one service."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedcore.errors import PagedCoreError
from pagedcore.http.cross_origin import CrossOrigin, add_headers
from pagedcore.openai import error_response
from pagedcore.openai.errors import http_error

_NOTED = "pagedcore_error"


def note_error(request: Request, error: PagedCoreError) -> None:
    """Let `ErrorReplies` answer this request with `error`, whatever BentoML sends for it."""
    setattr(request.state, _NOTED, error)


class ErrorReplies:
    """ASGI middleware that answers with what `note_error` noted, and says in OpenAI's form that there is no such route.

    BentoML itself would hide the sentence of a 401 or 503, has no Retry-After, and ends a stream that failed as if it were whole. Here
    such a stream breaks: its last chunk is never sent, and the client raises. What pages of other origins may do at `paths`, the native
    methods, is said here as OpenAI's routes say it.
    """

    def __init__(self, app: ASGIApp, *, paths: Collection[str] = (), cors_origins: Collection[str] = ()) -> None:
        self._app = app
        self._paths = frozenset(paths)
        self._cross_origin = CrossOrigin(cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        is_native = self._cross_origin.is_on and scope["path"] in self._paths
        if is_native and request.method == "OPTIONS":
            response = await self._cross_origin.marking(self._preflight)(request)
            await response(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        has_started = False
        unrouted: HTTPException | None = None

        async def send_unless_noted(message: Message) -> None:
            nonlocal has_started, unrouted
            error: PagedCoreError | None = state.get(_NOTED)
            if error is not None:
                if has_started:
                    raise error
                return
            if message["type"] == "http.response.start":
                unrouted = _unrouted(message)
                if is_native:
                    add_headers(MutableHeaders(scope=message), self._cross_origin.headers_for(request.headers))
            if unrouted is None:
                has_started = True
                await send(message)

        await self._app(scope, receive, send_unless_noted)
        if has_started:
            return
        if _NOTED in state:
            response = error_response(state[_NOTED])
        elif unrouted is not None:
            response = await http_error(request, unrouted)
        else:
            return
        await self._cross_origin.mark(request, response)(scope, receive, send)

    async def _preflight(self, request: Request) -> Response:
        try:
            return await self._cross_origin.preflight(request)
        except PagedCoreError as error:
            return error_response(error)


def _unrouted(start: Message) -> HTTPException | None:
    """What Starlette's own router says, in plain text, for a path or a method that it does not know."""
    headers = Headers(raw=start["headers"])
    if start["status"] not in (404, 405) or not headers.get("Content-Type", "").startswith("text/plain"):
        return None
    return HTTPException(start["status"], headers={"Allow": headers["Allow"]} if "Allow" in headers else None)
