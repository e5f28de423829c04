"""Errors of the native BentoML methods as HTTP answers: the bodies and headers of OpenAI's routes, beside them in one service."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedcore.errors import PagedCoreError
from pagedcore.openai import error_response

_NOTED = "pagedcore_error"


def note_error(request: Request, error: PagedCoreError) -> None:
    """Let `ErrorReplies` answer this request with `error`, whatever BentoML sends for it."""
    setattr(request.state, _NOTED, error)


class ErrorReplies:
    """ASGI middleware that answers with what `note_error` noted.

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

        async def send_unless_noted(message: Message) -> None:
            nonlocal has_started
            error: PagedCoreError | None = state.get(_NOTED)
            if error is None:
                has_started = True
                await send(message)
            elif has_started:
                raise error

        await self._app(scope, receive, send_unless_noted)
        if not has_started and _NOTED in state:
            await error_response(state[_NOTED])(scope, receive, send)
