"""What passes between the processes of a LitServe server: plain data, picklable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pagedcore.client import ModelInfo
from pagedcore.config import EnginePlan
from pagedcore.messages import InboxMessage, RequestUpdate
from pagedcore.routing.prefix_keys import PrefixKey
from pagedcore_adapters._litserve_questions import Answer, Question


class Sender(NamedTuple):
    """Which API server sends a message, and to which life of the worker: a later one drops what was meant for an earlier one."""

    queue_id: int
    incarnation: int = 0


Envelope = tuple[Sender, InboxMessage | Question]
"""What a control queue carries."""


class ControlQueue(Protocol):
    """One worker's inbox, shared by all API servers: a queue of the server's manager."""

    def put(self, item: Envelope) -> None: ...

    def get(self, block: bool = True, timeout: float | None = None) -> Envelope: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker says of itself once it is warm."""

    plan: EnginePlan
    info: ModelInfo
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker tells the API servers that it is warm."""

    worker_id: int
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class WorkerAway:
    """A worker tells the API servers that its engine, which runs in a process of its own, takes no requests; it starts again."""

    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The main process tells the API servers that a worker has ended."""

    worker_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Traffic:
    """An API server tells the others where its last prompts went, and how many requests of its own each worker has open."""

    queue_id: int
    prompts: list[tuple[int, list[PrefixKey]]]
    loads: list[int]


@dataclass(frozen=True, slots=True)
class Drain:
    """The main process tells the API servers to take no more requests, and how long the open ones may go on."""

    timeout_s: float


Reply = list[RequestUpdate] | Answer | WorkerReady | WorkerAway
"""What a worker sends to an API server."""

News = WorkerLost | Traffic | Drain
"""What the main process and other API servers send to one."""
