"""The API server's side where the engine is at a Unix socket: each API server has its own way to it, past the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedcore import AsyncEngine
from pagedcore.client import EngineClient
from pagedcore.errors import EngineClosedError
from pagedcore.remote.attached import ENGINE_START_TIMEOUT_S
from pagedcore_adapters._litserve_messages import Drain


class AttachedClient:
    """Owns the connection of one API server. Made before the API servers are forked, started in each of them."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._engine: AsyncEngine | None = None
        self._draining: asyncio.Task[None] | None = None

    def start(self, *unused: Any, on_drained: Callable[[], None] = lambda: None, **also_unused: Any) -> None:
        """Connect, and load the tokenizer of the engine's model. Raises what `AsyncEngine.connect` raises."""
        self._on_drained = on_drained
        self._engine = AsyncEngine.connect(self._path, timeout_s=ENGINE_START_TIMEOUT_S)

    def engine_client(self) -> EngineClient:
        """What the routes ask. Raises `EngineClosedError` before the start."""
        if self._engine is None:
            raise EngineClosedError("The API server has not started yet.")
        return self._engine

    def receive(self, message: object) -> None:
        """Take news of the main process; those of workers are nobody's here. Called on the event loop."""
        if isinstance(message, Drain) and self._engine is not None:
            self._engine.front.begin_drain()
            self._draining = asyncio.get_running_loop().create_task(self._drain(self._engine, message.timeout_s))

    async def _drain(self, engine: AsyncEngine, timeout_s: float) -> None:
        """Let the open requests end, and end them where they do not within this time."""
        if not await engine.drain(timeout_s):
            await engine.close()
        self._on_drained()
