"""A BentoML service of an engine at a Unix socket: all its workers, and whoever else attaches there, share that engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from pagedcore import AsyncEngine
from pagedcore.errors import ConfigError
from pagedcore.openai.router import OpenAIRoute
from pagedcore.remote.attached import ENGINE_START_TIMEOUT_S

ENGINE_METRICS_PATH = "/engine/metrics"
"""BentoML's own /metrics holds what its workers count, and an engine at a socket counts for itself."""


def attach(socket: str | Path) -> AsyncEngine:
    """The engine at the socket, which may still be loading. Raises what `AsyncEngine.connect` raises."""
    return AsyncEngine.connect(socket, timeout_s=ENGINE_START_TIMEOUT_S)


def check_attached(socket: str | Path, config: object, warmup_file: str | None) -> None:
    """Raises `ConfigError` for settings of an engine that is not made here."""
    if (config, warmup_file) != (None, None):
        where = f"The engine at {str(socket)!r} has its config and warm-up prompts from where it was started"
        raise ConfigError(f"{where}; give no config and warmup_file here.")


def add_engine_metrics(app: FastAPI, engine: Callable[[], AsyncEngine]) -> None:
    """Serve the numbers of the engine."""
    router = APIRouter(route_class=OpenAIRoute)

    @router.get(ENGINE_METRICS_PATH)
    async def engine_metrics(request: Request) -> Response:
        text, content_type = await engine().metrics_text(request.headers.get("Accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    app.include_router(router)
