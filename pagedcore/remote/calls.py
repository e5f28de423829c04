"""What a front may ask of an engine in another process, beside requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from pagedcore.errors import InvalidRequestError
from pagedcore.messages import AddRequest
from pagedcore.remote.lost_requests import lost_ends
from pagedcore.remote.open_requests import OpenRequest
from pagedcore.remote.request_ids import ClientIds

if TYPE_CHECKING:
    from pagedcore.async_engine import AsyncEngine


class Calls:
    """The functions of one engine that its fronts call by name; the arguments are plain data."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        loop = engine.loop
        self._functions: dict[str, Callable[..., Any]] = {
            "stats": engine.stats,
            "advice": engine.advice,
            "check": engine.check,
            "reset_prefix_cache": engine.reset_prefix_cache,
            "flush_metrics": loop.flush_metrics,
            "metrics": self._metrics,
            "record_trace": engine.record_trace,
            "pause_recording": loop.pause_recording,
            "start_recording": loop.start_recording,
            "name_engine": self._name_engine,
            "count_lost": self._count_lost,
            "recent": engine.history.recent,
        }

    def answer(self, name: str, arguments: dict[str, Any], ids: ClientIds) -> Any:
        """Raises what the function raises, and `InvalidRequestError` for another name."""
        if name == "inspect":
            return self._inspect(**arguments, ids=ids)
        if name == "find":
            return self._engine.history.find(ids.known_as(arguments["request_id"]))
        find = self._functions.get(name)
        if find is None:
            raise InvalidRequestError(f"The engine has no call {name!r}.", param="name")
        return find(**arguments)

    def _inspect(self, question: str, arguments: dict[str, Any], ids: ClientIds) -> dict[str, Any]:
        if "request_id" in arguments:
            arguments = {**arguments, "request_id": ids.known_as(arguments["request_id"])}
        return self._engine.inspect_sync(question, **arguments)[0]

    def _metrics(self, accept: str) -> tuple[bytes, str]:
        from pagedcore.observe.exposition import metrics_text

        self._engine.loop.flush_metrics()
        return metrics_text(accept=accept)

    def _count_lost(self, requests: list[dict[str, Any]], num_tokens: list[int]) -> None:
        """A front had these requests at an engine that died; what it told of them was counted there."""
        added = [msgspec.convert(request, AddRequest) for request in requests]
        lost = [OpenRequest(request, list.clear, count) for request, count in zip(added, num_tokens, strict=True)]
        self._engine.loop.count_lost(lost_ends(lost, time.monotonic()))

    def _name_engine(self, label: str) -> None:
        """The front that exports the numbers calls the engine so."""
        self._engine.loop.recorder.engine = label
