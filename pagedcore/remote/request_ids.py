"""Ids of requests where several clients choose them: each keeps its own, and none meets another's."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pagedcore.errors import id_in_use
from pagedcore.messages import AddRequest, RequestUpdate

MAX_REMEMBERED = 1024
"""Ended requests with another id in the engine that a client may still ask about by its own."""


@dataclass(slots=True)
class _Group:
    """The open choices of one request, and what stands behind their ids in the engine."""

    group_id: str
    suffix: str
    num_open: int = 0


class EngineIds:
    """Owns the group ids, as the engine has them, that all its clients have open. The lock is theirs, too."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.groups: dict[str, ClientIds] = {}
        """The engine's id -> whose it is."""

    def has_of_others(self, group_id: str, client: ClientIds) -> bool:
        """Whether the id, or that of a choice of the one or the other, is one that another client has open."""
        return any(
            owner is not client and (group_id == group or group_id.startswith(f"{group}#") or group.startswith(f"{group_id}#"))
            for group, owner in self.groups.items()
        )


class ClientIds:
    """Owns the ids of one client's open requests. Thread-safe.

    A request has its client's id in the engine, too, unless another client has one of that id: then a suffix is added there.
    """

    def __init__(self, engine: EngineIds) -> None:
        self._engine = engine
        self._groups: dict[str, _Group] = {}
        self._open: dict[str, tuple[str, _Group]] = {}
        """The client's id -> the engine's, and the group."""
        self._renamed: dict[str, str] = {}
        """Engine's ids with a suffix -> the client's."""
        self._ended: deque[tuple[str, str]] = deque(maxlen=MAX_REMEMBERED)
        """The client's id and the engine's."""

    def open(self, request: AddRequest) -> AddRequest:
        """The request as the engine gets it. Raises `InvalidRequestError` for an id that this client has open."""
        with self._engine.lock:
            if request.request_id in self._open:
                raise id_in_use(request.request_id)
            group = self._groups.get(request.group_id) or self._open_group(request.group_id)
            group.num_open += 1
            engine_id = request.request_id + group.suffix
            self._open[request.request_id] = engine_id, group
            if not group.suffix:
                return request
            self._renamed[engine_id] = request.request_id
            return replace(request, request_id=engine_id, group_id=request.group_id + group.suffix)

    def engine_id(self, request_id: str) -> str | None:
        """What an open request is called in the engine."""
        found = self._open.get(request_id)
        return None if found is None else found[0]

    def known_as(self, request_id: str) -> str:
        """The same for any request that the client may ask about."""
        with self._engine.lock:
            ended = next((engine_id for client_id, engine_id in reversed(self._ended) if client_id == request_id), request_id)
        return self.engine_id(request_id) or ended

    def translate(self, updates: Iterable[RequestUpdate]) -> None:
        """Give updates of the engine their client's ids; requests that end by them are no longer open."""
        renamed = self._renamed
        for update in updates:
            engine_id = update.request_id
            if renamed:
                update.request_id = renamed.get(engine_id, engine_id)
            if update.finish_reason is not None:
                self._close(update.request_id, engine_id)

    def open_ids(self) -> list[str]:
        """The engine's ids of all open requests."""
        with self._engine.lock:
            return [engine_id for engine_id, _ in self._open.values()]

    def _open_group(self, group_id: str) -> _Group:
        suffix = f"~{uuid.uuid4().hex[:8]}" if self._engine.has_of_others(group_id, self) else ""
        self._engine.groups[group_id + suffix] = self
        group = self._groups[group_id] = _Group(group_id, suffix)
        return group

    def _close(self, request_id: str, engine_id: str) -> None:
        with self._engine.lock:
            _, group = self._open.pop(request_id, (engine_id, None))
            if group is None:
                return
            group.num_open -= 1
            if not group.num_open:
                del self._groups[group.group_id]
                del self._engine.groups[group.group_id + group.suffix]
            if self._renamed.pop(engine_id, None) is not None:
                self._ended.append((request_id, engine_id))
