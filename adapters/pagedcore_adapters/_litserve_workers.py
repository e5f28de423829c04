"""Which workers can take a request, as one API server knows it."""

from __future__ import annotations

from collections.abc import Mapping

from pagedcore.errors import EngineClosedError
from pagedcore_adapters._litserve_messages import WorkerAway, WorkerFacts, WorkerLost, WorkerReady


class Workers:
    """Owns the state of each worker: it starts, is ready, lives and waits for its engine, or has ended and starts again.

    Used on one event loop only.
    """

    def __init__(self, num_workers: int, facts: Mapping[int, WorkerFacts]) -> None:
        """`facts` are those of the workers that are ready already."""
        self._num_workers = num_workers
        self._incarnations = {worker_id: worker.incarnation for worker_id, worker in facts.items()}
        self._away: dict[int, str] = {}
        """Living ones whose engine is away, and why."""
        self._ended: dict[int, str] = {}

    def incarnation(self, worker_id: int) -> int:
        """Which of its lives a worker is in; that of one that is not ready is 0."""
        return self._incarnations.get(worker_id, 0)

    def note(self, news: WorkerReady | WorkerAway | WorkerLost) -> None:
        """A worker has become ready, waits for its engine, or has ended."""
        self._away.pop(news.worker_id, None)
        if isinstance(news, WorkerAway):
            self._away[news.worker_id] = news.reason
        elif isinstance(news, WorkerReady):
            self._incarnations[news.worker_id] = news.incarnation
            self._ended.pop(news.worker_id, None)
        else:
            self._incarnations.pop(news.worker_id, None)
            self._ended[news.worker_id] = news.reason

    def usable(self) -> list[int]:
        """Those that are ready, in order. Raises `EngineClosedError` when none is."""
        usable = sorted(self._incarnations.keys() - self._away.keys())
        if not usable:
            raise EngineClosedError(f"No worker process can take a request: {self._states()}.")
        return usable

    def check_one_lives(self) -> None:
        """Raise `EngineClosedError`, which says what each does, where none lives. One whose engine starts again does."""
        if not self._incarnations:
            self.usable()

    def check_all_ready(self) -> None:
        """Raise `EngineClosedError`, which says which worker is in what state, unless all are ready."""
        num_ready = len(self._incarnations.keys() - self._away.keys())
        if num_ready < self._num_workers:
            raise EngineClosedError(f"{num_ready} of {self._num_workers} worker processes are ready: {self._states()}.")

    def _states(self) -> str:
        return ", ".join(self._state(one) for one in range(self._num_workers) if one not in self._incarnations or one in self._away)

    def _state(self, one: int) -> str:
        if one in self._away:
            return f"{one} waits for its engine ({self._away[one]})"
        return f"{one} starts again after it ended ({self._ended[one]})" if one in self._ended else f"{one} starts"
