"""A BentoML service with the engine in its worker: `bentoml serve pagedcore_adapters.bentoml_service:PagedCoreService`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagedcore_adapters._extras import missing_extra

try:
    import bentoml
except ImportError as error:
    raise missing_extra("bentoml", "bentoml", error) from error

from pagedcore import AsyncEngine, EngineConfig
from pagedcore.openai import ServerSettings, build_app
from pagedcore.openai.service import OpenAIService
from pagedcore.warm_up import as_token_ids, read_warm_up_file
from pagedcore_adapters._bentoml_attached import add_engine_metrics, attach, check_attached
from pagedcore_adapters._bentoml_bodies import ChatMessage
from pagedcore_adapters._bentoml_errors import ErrorReplies
from pagedcore_adapters._bentoml_image import WHEEL, default_image
from pagedcore_adapters._bentoml_native import NativeAPI, Reply
from pagedcore_adapters._bentoml_signals import on_terminate
from pagedcore_adapters._environment import (
    api_keys_from_environment,
    config_from_environment,
    cors_origins_from_environment,
    socket_from_environment,
    warmup_file_from_environment,
)
from pagedcore_adapters._prometheus_dir import engine_label, forget_ended_processes
from pagedcore_adapters.shared_engine import shared_engine

__all__ = ["DRAIN_TIMEOUT_S", "WHEEL", "ChatMessage", "PagedCoreService", "Reply", "build_service", "default_image"]

FIRST_BYTE_TIMEOUT_S = 3600
"""BentoML's `traffic.timeout` ends at the first byte of an answer; a long answer that is not streamed has none before its end."""
DRAIN_TIMEOUT_S = 30.0
ONE_CONNECTION = {"max_requests": 2**31 - 1, "max_age": 1e9}
"""A service that depends on ours would end every open answer, by BentoML's defaults, at each hundredth request and every 300 s."""
LABELS = {"openai_endpoint": "/v1"}
"""Tells BentoML's clients and pages where the OpenAI routes are."""


def build_service(
    config: EngineConfig | Mapping[str, Any] | None = None,
    settings: ServerSettings | None = None,
    *,
    name: str = "pagedcore",
    warmup_file: str | None = None,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    socket: str | Path | None = None,
    **options: Any,
) -> bentoml.Service[Any]:
    """A service for a user's own file: `svc = build_service(EngineConfig(...))`, then `bentoml serve file:svc`.

    When the worker starts, `PAGEDCORE_CONFIG` and `PAGEDCORE_MODEL` are read without `config`, and `PAGEDCORE_WARMUP_FILE` without
    `warmup_file`; without `settings` `PAGEDCORE_API_KEY` and `PAGEDCORE_CORS_ORIGINS` are read now. `options` go to `bentoml.service`;
    of `traffic` and `labels` only what is named changes. At SIGTERM running requests have `drain_timeout_s` to end. No model is loaded
    in the parent.
    `socket` is that of an engine which runs already (`pagedcore engine --socket PATH`, also `PAGEDCORE_SOCKET`, which goes before the
    rest of the environment): all workers share it, none is made here, and its series stand in /engine/metrics.
    Each server on a machine needs its own BENTOML_HOME: BentoML empties the metrics folder in it when it starts.

    Raises `ConfigError` for settings that cannot work together.
    """
    socket = socket_from_environment() if socket is None and config is None else socket
    if socket is not None:
        check_attached(socket, config, warmup_file)
    served = replace(settings or _settings_from_environment(), adapter="bentoml", serve_metrics=False)
    app = build_app(_engine_of_this_worker, served)
    if socket is not None and served.allow_operator_routes:
        add_engine_metrics(app, _engine_of_this_worker)

    @bentoml.asgi_app(app, path="/")
    class PagedCoreService(NativeAPI):
        """Owns the engine of one worker process, or its way to one; /metrics is BentoML's own and holds the series of this process."""

        def __init__(self) -> None:
            forget_ended_processes()
            self.engine = attach(socket) if socket is not None else shared_engine(_of_this_worker(_as_config(config)))
            self.access = OpenAIService(self.engine, served)
            path = warmup_file or warmup_file_from_environment()
            if path is not None and socket is None:
                self.engine.warm_up([as_token_ids(prompt, self.engine.text) for prompt in read_warm_up_file(path)])

        @bentoml.on_startup
        async def close_at_sigterm(self) -> None:
            """In a worker of `bentoml serve`: its server would wait for the last answer without end."""
            if bentoml.server_context.worker_index is not None:
                loop = asyncio.get_running_loop()
                on_terminate(lambda: loop.call_soon_threadsafe(self._begin_to_close))

        @bentoml.on_shutdown
        async def close(self) -> None:
            """Let running requests end, abort them when `drain_timeout_s` is over, and give the memory back."""
            await self.engine.drain(drain_timeout_s)
            await self.engine.close()

        async def __is_alive__(self) -> bool:
            return await self.engine.is_alive()

        async def __is_ready__(self) -> bool:
            return await self.is_ready()

        def _begin_to_close(self) -> None:
            self._closing = asyncio.ensure_future(self.close())

    service: bentoml.Service[Any] = bentoml.service(**_with_defaults({"name": name, **options}))(PagedCoreService)
    paths = {(service.path_prefix or "").rstrip("/") + method.route for method in service.apis.values()}
    service.add_asgi_middleware(ErrorReplies, paths=paths, cors_origins=served.cors_origins)
    return service


def _with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """One engine, no limit below the engine's own, and a container, unless the options say otherwise."""
    ours = {"workers": 1, "image": default_image(), "runner_connection": ONE_CONNECTION}
    traffic = {"timeout": FIRST_BYTE_TIMEOUT_S, **options.pop("traffic", {})}
    labels = {**LABELS, **options.pop("labels", {})}
    return {**ours, "traffic": traffic, "labels": labels, **options}


def _settings_from_environment() -> ServerSettings:
    return ServerSettings(api_keys=api_keys_from_environment(), cors_origins=cors_origins_from_environment())


def _as_config(config: EngineConfig | Mapping[str, Any] | None) -> EngineConfig:
    if config is None:
        return config_from_environment()
    return config if isinstance(config, EngineConfig) else EngineConfig.from_mapping(config)


def _of_this_worker(config: EngineConfig) -> EngineConfig:
    """The config with the `engine` label of this worker process; BentoML counts workers from 1, and knows none outside of one."""
    index = bentoml.server_context.worker_index
    return config if index is None else config.replace(metrics_instance=engine_label(config, index - 1))


def _engine_of_this_worker() -> AsyncEngine:
    engine: AsyncEngine = bentoml.get_current_service().engine
    return engine


PagedCoreService = build_service()
