"""Errors of the native BentoML methods as HTTP answers: the bodies and headers of OpenAI's routes, beside them in one service."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedcore.errors import PagedCoreError
from pagedcore.openai import error_response
from pagedcore.openai.errors import http_error

_NOTED = "pagedcore_error"


def note_error(request: Request, error: PagedCoreError) -> None:
    """Let `ErrorReplies` answer this request with `error`, whatever BentoML sends for it."""
    setattr(request.state, _NOTED, error)


class ErrorReplies:
    """ASGI middleware that answers with what `note_error` noted, and says in OpenAI's form that there is no such route.

    BentoML itself would hide the sentence of a 401 or 503, has no Retry-After, and ends a stream that failed as if it were whole. Here
    such a stream breaks: its last chunk is never sent, and the client raises.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
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
            if unrouted is None:
                has_started = True
                await send(message)

        await self._app(scope, receive, send_unless_noted)
        if has_started:
            return
        if _NOTED in state:
            await error_response(state[_NOTED])(scope, receive, send)
        elif unrouted is not None:
            response = await http_error(Request(scope), unrouted)
            await response(scope, receive, send)


def _unrouted(start: Message) -> HTTPException | None:
    """What Starlette's own router says, in plain text, for a path or a method that it does not know."""
    headers = Headers(raw=start["headers"])
    if start["status"] not in (404, 405) or not headers.get("Content-Type", "").startswith("text/plain"):
        return None
    return HTTPException(start["status"], headers={"Allow": headers["Allow"]} if "Allow" in headers else None)
