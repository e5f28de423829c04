"""A BentoML service with the engine in its worker: `bentoml serve pagedcore_adapters.bentoml_service:PagedCoreService`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagedcore_adapters._extras import missing_extra

try:
    import bentoml
except ImportError as error:
    raise missing_extra("bentoml", "bentoml", error) from error

from pagedcore import AsyncEngine, EngineConfig
from pagedcore.openai import ServerSettings, build_app
from pagedcore.warm_up import as_token_ids, read_warm_up_file
from pagedcore_adapters._environment import api_keys_from_environment, config_from_environment, warmup_file_from_environment
from pagedcore_adapters._prometheus_dir import engine_label
from pagedcore_adapters.shared_engine import shared_engine

FIRST_BYTE_TIMEOUT_S = 3600
"""BentoML's `traffic.timeout` ends at the first byte of an answer; a long answer that is not streamed has none before its end."""
DRAIN_TIMEOUT_S = 30.0


def build_service(
    config: EngineConfig | Mapping[str, Any] | None = None,
    settings: ServerSettings | None = None,
    *,
    name: str = "pagedcore",
    warmup_file: str | None = None,
    **options: Any,
) -> bentoml.Service[Any]:
    """A service for a user's own file: `svc = build_service(EngineConfig(...))`, then `bentoml serve file:svc`.

    Without `config` the environment is read (`PAGEDCORE_CONFIG`, `PAGEDCORE_MODEL`, `PAGEDCORE_API_KEY`,
    `PAGEDCORE_WARMUP_FILE`) when the worker starts. `options` go to `bentoml.service`. No model is loaded in the parent.
    Each server on a machine needs its own BENTOML_HOME: BentoML empties the metrics folder in it when it starts.
    """
    served = settings or ServerSettings(api_keys=api_keys_from_environment())
    app = build_app(_engine_of_this_worker, replace(served, adapter="bentoml", serve_metrics=False))

    @bentoml.service(**{"name": name, "workers": 1, "traffic": {"timeout": FIRST_BYTE_TIMEOUT_S}, **options})
    @bentoml.asgi_app(app, path="/")
    class PagedCoreService:
        """Owns the engine of one worker process; /metrics is BentoML's own and holds the engine's series."""

        def __init__(self) -> None:
            self.engine = shared_engine(_of_this_worker(_as_config(config)))
            self.is_warm = False

        @bentoml.on_startup
        async def warm_up(self) -> None:
            path = warmup_file or warmup_file_from_environment()
            if path is not None:
                prompts = [as_token_ids(prompt, self.engine.text) for prompt in read_warm_up_file(path)]
                await asyncio.to_thread(self.engine.warm_up, prompts)
            self.is_warm = True

        @bentoml.on_shutdown
        async def close(self) -> None:
            await self.engine.drain(DRAIN_TIMEOUT_S)
            await self.engine.close()

        async def __is_alive__(self) -> bool:
            return await self.engine.is_alive()

        async def __is_ready__(self) -> bool:
            return self.is_warm and await self.engine.is_ready()

    return PagedCoreService


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
