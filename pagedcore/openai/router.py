"""OpenAI's routes. Health and what operators ask are in `pagedcore.console`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from pagedcore.client import ModelInfo
from pagedcore.errors import PagedCoreError
from pagedcore.http.cross_origin import ANY, CrossOrigin, add_preflights
from pagedcore.http.json_text import json_reply
from pagedcore.http.request_ids import REQUEST_ID_HEADER, assign_request_id
from pagedcore.openai.calls import read_chat, read_completion, read_detokenize, read_tokenize, served_model
from pagedcore.openai.errors import add_error_handlers, error_response
from pagedcore.openai.service import ClientOrGetter, OpenAIService
from pagedcore.openai.settings import ServerSettings

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[Any]]


class OpenAIRoute(APIRoute):
    """A route whose every answer carries the request's id, and whose errors have OpenAI bodies, in whatever app it is."""

    cross_origin = CrossOrigin(())

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                assign_request_id(request)
                response = await handle(request)
            except PagedCoreError as error:
                response = error_response(error)
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody reads it
            response.headers[REQUEST_ID_HEADER] = request.state.request_id
            return response

        return self.cross_origin.marking(guarded)


def build_router(client: ClientOrGetter, settings: ServerSettings | None = None) -> APIRouter:
    """The routes over an engine, or over a function that returns it, for hosts that create it after the routes."""
    from pagedcore.console.routes import add_health_routes, add_operator_routes  # they are built on this package

    service = OpenAIService(client, settings or ServerSettings())
    origins = service.settings.cors_origins
    router = _router(origins, service, _add_generation_routes, _add_model_routes, add_health_routes)
    if service.settings.allow_operator_routes:
        named = [origin for origin in origins if origin != ANY]
        router.include_router(_router(named, service, add_operator_routes))
    return router


def build_app(client: ClientOrGetter, settings: ServerSettings | None = None, lifespan: Lifespan | None = None) -> FastAPI:
    """A whole app: the routes, and OpenAI bodies for all that goes wrong outside them."""
    app = FastAPI(title="pagedcore", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.include_router(build_router(client, settings))
    add_error_handlers(app, settings.cors_origins if settings else ())
    return app


def _router(cors_origins: Iterable[str], service: OpenAIService, *adders: Callable[[APIRouter, OpenAIService], None]) -> APIRouter:
    class Route(OpenAIRoute):
        cross_origin = CrossOrigin(cors_origins)

    router = APIRouter(route_class=Route)
    for add in adders:
        add(router, service)
    if Route.cross_origin.is_on:
        add_preflights(router, Route.cross_origin)
    return router


def _add_generation_routes(router: APIRouter, service: OpenAIService) -> None:
    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await service.generate(request, read_completion)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await service.generate(request, read_chat)

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await service.answer(request, read_tokenize)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await service.answer(request, read_detokenize)


def _add_model_routes(router: APIRouter, service: OpenAIService) -> None:
    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        service.tenant(request)
        info = service.client.info
        return json_reply({"object": "list", "data": [_model_card(name, info) for name in info.model_names]})

    @router.head("/v1/models/{model_id:path}", include_in_schema=False)
    @router.get("/v1/models/{model_id:path}")
    async def model(request: Request, model_id: str) -> Response:
        service.tenant(request)
        info = service.client.info
        return json_reply(_model_card(served_model(model_id, info), info))


def _model_card(name: str, info: ModelInfo) -> dict[str, object]:
    card = {"id": name, "object": "model", "created": info.created_s, "owned_by": "pagedcore"}
    return {**card, "root": info.model_names[0], "parent": None, "max_model_len": info.max_model_len}
