"""The OpenAI protocol: one pure translation and one FastAPI router on it, over any `EngineClient`."""

from __future__ import annotations

from pagedcore.openai.errors import add_error_handlers, body_of, error_response
from pagedcore.openai.router import build_app, build_router
from pagedcore.openai.settings import ServerSettings

__all__ = ["ServerSettings", "add_error_handlers", "body_of", "build_app", "build_router", "error_response"]
