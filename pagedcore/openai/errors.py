"""Errors as OpenAI bodies: one shape for everything that goes wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pagedcore.errors import AuthenticationError, EngineClosedError, PagedCoreError, QueueFullError, RequestError
from pagedcore.http.cross_origin import CrossOrigin
from pagedcore.http.json_text import json_reply
from pagedcore.http.request_ids import REQUEST_ID_HEADER, request_id_of

_WHY_NOT = {
    "/v1/embeddings": ": the model generates text and makes no embeddings",
    "/v1/responses": ": use /v1/chat/completions",
}
"""Path of OpenAI's that is not offered -> why."""


def body_of(error: PagedCoreError) -> dict[str, object]:
    """The body of one of our errors, which OpenAI's clients turn into an exception."""
    return _body(str(error), error.openai_type, error.param if isinstance(error, RequestError) else None, error.code)


def error_response(error: PagedCoreError) -> Response:
    """The whole HTTP answer of one of our errors, with Retry-After where trying again makes sense."""
    headers: dict[str, str] = {}
    if isinstance(error, (QueueFullError, EngineClosedError)):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))  # HTTP wants whole seconds
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    return json_reply(body_of(error), error.http_status, headers)


def add_error_handlers(app: FastAPI, cors_origins: Iterable[str] = ()) -> None:
    """Give unknown routes, wrong methods and unexpected failures of an app OpenAI bodies, which pages of these origins may read."""
    cross_origin = CrossOrigin(cors_origins)
    app.add_exception_handler(HTTPException, cross_origin.marking(http_error))
    app.add_exception_handler(Exception, cross_origin.marking(_unexpected_error))


def _body(message: str, error_type: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


async def http_error(request: Request, exc: Exception) -> Response:
    """The whole answer to a request that no route takes, or that the framework refused."""
    assert isinstance(exc, HTTPException), "registered for HTTPException"
    path, allowed = request.url.path, (exc.headers or {}).get("Allow", "another method")
    message, code = {
        404: (f"There is no route {request.method} {path}{_WHY_NOT.get(path, '')}.", "unknown_url"),
        405: (f"{path} does not take {request.method}; it takes {allowed}.", "method_not_allowed"),
    }.get(exc.status_code, (str(exc.detail), None))
    body = _body(message, "server_error" if exc.status_code >= 500 else "invalid_request_error", code=code)
    return json_reply(body, exc.status_code, {**(exc.headers or {}), REQUEST_ID_HEADER: request_id_of(request)})


async def _unexpected_error(request: Request, exc: Exception) -> Response:
    request_id = request_id_of(request)
    message = f"The server failed on request {request_id} ({type(exc).__name__}); its log has the details."
    return json_reply(_body(message, "server_error", code="internal_error"), 500, {REQUEST_ID_HEADER: request_id})
