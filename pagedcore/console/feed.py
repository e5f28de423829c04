"""The live page's news: one producer for all viewers, and none while nobody looks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

FEED_INTERVAL_S = 1.0
MAX_STREAM_S = 20.0
"""A stream ends after this long and its viewer connects again: a server that shuts down waits for open streams."""

_Viewer = asyncio.Queue[bytes | None]


class Feed:
    """Owns the viewers and the producer that runs while there is one. Used on one event loop.

    `ask` gives the next event, or None when the engine is gone and all streams should end. A viewer that reads slowly
    misses events instead of piling them up.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[bytes | None]],
        *,
        interval_s: float = FEED_INTERVAL_S,
        max_stream_s: float = MAX_STREAM_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._interval_s = interval_s
        self._max_stream_s = max_stream_s
        self._clock = clock
        self._viewers: set[_Viewer] = set()
        self._producer: asyncio.Task[None] | None = None
        self._latest: bytes | None = None

    @property
    def is_running(self) -> bool:
        return self._producer is not None

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Events from now on, the latest one at once. Closing the generator is leaving."""
        viewer = self._enter()
        ends_s = self._clock() + self._max_stream_s
        try:
            while self._clock() < ends_s and (event := await viewer.get()) is not None:
                yield event
        finally:
            self._leave(viewer)

    def _enter(self) -> _Viewer:
        viewer: _Viewer = asyncio.Queue(maxsize=1)
        self._viewers.add(viewer)
        if self._producer is None:
            self._producer = asyncio.create_task(self._produce())
        elif self._latest is not None:
            viewer.put_nowait(self._latest)
        return viewer

    def _leave(self, viewer: _Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers and self._producer is not None:
            self._producer.cancel()
            self._producer = self._latest = None

    async def _produce(self) -> None:
        event: bytes | None = b""
        while event is not None:
            event = self._latest = await self._ask()
            for viewer in self._viewers:
                if viewer.full():
                    viewer.get_nowait()
                viewer.put_nowait(event)
            if event is not None:
                await asyncio.sleep(self._interval_s)
        self._producer = self._latest = None  # who comes later asks again
