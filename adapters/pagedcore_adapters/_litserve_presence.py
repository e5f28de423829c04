"""What a worker tells of its engine, which may be in a process of its own: whether it is there."""

from __future__ import annotations

from collections.abc import Callable

from pagedcore.errors import EngineClosedError
from pagedcore_adapters._litserve_messages import WorkerAway, WorkerReady


class Presence:
    """Owns what the API servers have been told of one worker's engine. Used on one thread."""

    def __init__(
        self, worker_id: int, incarnation: int, check: Callable[[], None], tell_all: Callable[[WorkerReady | WorkerAway], None]
    ) -> None:
        """`check` raises `EngineClosedError`, which says why, while the engine takes no requests."""
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._check = check
        self._tell_all = tell_all
        self._told: WorkerReady | WorkerAway | None = None

    def look(self) -> None:
        """Tell all API servers where it is not as they were told."""
        news = self._news()
        if news != self._told:
            self._told = news
            self._tell_all(news)

    def _news(self) -> WorkerReady | WorkerAway:
        try:
            self._check()
        except EngineClosedError as error:
            return WorkerAway(self._worker_id, str(error))
        return WorkerReady(self._worker_id, self._incarnation)
