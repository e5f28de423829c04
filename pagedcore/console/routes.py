"""The routes that operators ask: health, numbers, explanations, advice, requests, the trace, and the live page."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from pagedcore.console.access import caller_of, check_operator
from pagedcore.console.feed import Feed
from pagedcore.console.findings import findings
from pagedcore.console.indicators import indicators_as_json
from pagedcore.console.page_files import page_names, page_response
from pagedcore.console.trace_file import joined_trace
from pagedcore.errors import EngineClosedError, InvalidRequestError, PagedCoreError, UnknownRequestError
from pagedcore.http.event_stream import EventStream, sse, sse_error
from pagedcore.http.json_text import json_reply
from pagedcore.openai.errors import body_of
from pagedcore.openai.service import OpenAIService
from pagedcore.shown import shown

if TYPE_CHECKING:
    from fastapi import APIRouter

Answers = list[dict[str, Any]]

DEFAULT_LIMIT = 50
MAX_LIMIT = 1000

REPLY_PREFIXES = ("chatcmpl-", "cmpl-")
"""What stands before the request's id in the `id` of a reply."""


def add_operator_routes(router: APIRouter, service: OpenAIService) -> None:
    """Add what `allow_operator_routes` allows. All but /metrics and the page's own files obey the API key."""
    if service.settings.serve_metrics:
        _add_metrics_route(router, service)
    _add_number_routes(router, service)
    _add_request_routes(router, service)
    _add_page_routes(router, service)


def add_health_routes(router: APIRouter, service: OpenAIService) -> None:
    """Add /health and /ready, which need no key."""
    retry_after_s = service.settings.retry_after_s

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        if not await service.client.is_alive():
            raise EngineClosedError("The engine loop does not run.", retry_after_s=retry_after_s)
        return json_reply({"status": "ok"})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        if not await service.client.is_ready():
            raise EngineClosedError("The engine is loading, warming up or draining.", retry_after_s=retry_after_s)
        return json_reply({"status": "ready"})


def _add_metrics_route(router: APIRouter, service: OpenAIService) -> None:
    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        text, content_type = await service.client.metrics_text(request.headers.get("Accept", ""))
        return Response(text, headers={"Content-Type": content_type})


def _add_number_routes(router: APIRouter, service: OpenAIService) -> None:
    @router.get("/v1/stats")
    async def stats(request: Request) -> Response:
        check_operator(service, request)
        return _listed(await service.client.inspect("stats"))

    @router.get("/v1/cache/advice")
    async def advice(request: Request) -> Response:
        check_operator(service, request)
        return _listed(await service.client.inspect("advice"))

    @router.get("/v1/trace")
    async def trace(request: Request) -> Response:
        check_operator(service, request)
        body = joined_trace(await service.client.inspect("trace"))
        return json_reply(body, headers={"Content-Disposition": 'attachment; filename="pagedcore-trace.json"'})


def _add_request_routes(router: APIRouter, service: OpenAIService) -> None:
    @router.get("/v1/requests")
    async def requests(request: Request) -> Response:
        caller, limit = caller_of(service, request), _limit_of(request)
        search = request.query_params.get("search", "")
        answers = await service.client.inspect("requests", limit=limit, search=search, tenant=caller.tenant, is_operator=caller.is_operator)
        found = [one for answer in answers for one in answer["requests"]]
        return _listed(sorted(found, key=lambda one: one["age_s"])[:limit])

    @router.get("/v1/requests/{request_id:path}")
    async def one_request(request: Request, request_id: str) -> Response:
        caller = caller_of(service, request)
        who = {"tenant": caller.tenant, "is_operator": caller.is_operator}
        return json_reply(await _find(service, "request", request_id, **who))

    @router.get("/v1/cache/explain/{request_id:path}")
    async def explain(request: Request, request_id: str) -> Response:
        caller = caller_of(service, request)
        who = {"tenant": caller.tenant, "is_operator": caller.is_operator}
        return json_reply(await _find(service, "explain", request_id, **who))


def _add_page_routes(router: APIRouter, service: OpenAIService) -> None:
    feed = Feed(lambda: _next_event(service))
    text = "all" if service.settings.ui_show_text else "none"

    @router.get("/ui")
    async def page() -> Response:
        return page_response("index.html")

    @router.get("/ui/feed")
    async def live(request: Request) -> Response:
        check_operator(service, request)
        return EventStream(feed.events())

    @router.get("/ui/request/{request_id:path}")
    async def drawer(request: Request, request_id: str) -> Response:
        check_operator(service, request)
        timeline, explanation = await asyncio.gather(
            service.client.inspect("request", request_id=request_id),
            service.client.inspect("explain", request_id=request_id, show_text=text),
        )
        return json_reply({"request": _known(timeline, request_id), "explanation": _first(explanation)})

    for name in page_names():
        router.add_api_route(f"/ui/{name}", _file_route(name), methods=["GET"])


def _file_route(name: str) -> Any:
    async def page_file() -> Response:
        return page_response(name)

    return page_file


async def _next_event(service: OpenAIService) -> bytes | None:
    """What the page draws each second; None when the engine is closed."""
    try:
        stats, blocks = await asyncio.gather(service.client.inspect("stats"), service.client.inspect("blocks"))
    except EngineClosedError:
        return None
    except PagedCoreError as error:
        return sse_error(body_of(error))
    targets = service.settings.targets
    maps = {one["engine"]: one for one in blocks}
    engines = [
        {**one, "blocks": maps.get(one["engine"]), "indicators": indicators_as_json(one, targets), "findings": findings(one, targets)}
        for one in stats
    ]
    return sse({"time_s": time.time(), "engines": engines})


def _limit_of(request: Request) -> int:
    given = request.query_params.get("limit", str(DEFAULT_LIMIT))
    limit = int(given) if given.isascii() and given.isdigit() and len(given) < 6 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidRequestError(f"limit is {shown(given)} and must be an integer between 1 and {MAX_LIMIT}.", param="limit")
    return limit


def _listed(data: Answers) -> Response:
    return json_reply({"object": "list", "data": data})


def _first(answers: Answers) -> dict[str, Any] | None:
    """The answer of the engine that knows."""
    return next((answer for answer in answers if answer), None)


async def _find(service: OpenAIService, question: str, request_id: str, **who: Any) -> dict[str, Any]:
    """The answer about a request, by its id or by the `id` of its reply, which has the name of its kind before that."""
    answers: Answers = []
    for name in (request_id, *(request_id.removeprefix(prefix) for prefix in REPLY_PREFIXES if request_id.startswith(prefix))):
        answers = await service.client.inspect(question, request_id=name, **who)
        if any(answers):
            break
    return _known(answers, request_id)


def _known(answers: Answers, request_id: str) -> dict[str, Any]:
    answer = _first(answers)
    if answer is None:
        message = f"No request {shown(request_id)} of yours is known here: running requests and the last 1,024 that ended are."
        raise UnknownRequestError(message, param="request_id")
    return answer
