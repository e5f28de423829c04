"""What travels between a front and an engine in another process: msgpack, never pickle."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import msgspec
from msgspec import Raw, Struct

from pagedcore.advice.advice import Advice
from pagedcore.client import ModelInfo
from pagedcore.config import EngineConfig, EnginePlan
from pagedcore.messages import AddRequest, RequestUpdate
from pagedcore.observe.ledger import Exemplar, Key
from pagedcore.observe.stats import StatsSnapshot
from pagedcore.outputs import CacheReport, FinishReason, Logprob, RequestTimings, Status
from pagedcore.remote.faults import Fault, engine_error_of, fault_of
from pagedcore.sampling_params import SamplingParams
from pagedcore.structured_outputs import StructuredOutputsParams

_TRAVELLERS = (
    AddRequest, SamplingParams, StructuredOutputsParams, RequestUpdate, Logprob, CacheReport, RequestTimings,
    EngineConfig, EnginePlan, ModelInfo, StatsSnapshot, Advice,
)  # fmt: skip


class Frame(Struct, array_like=True, tag=True):
    """One message of either side; its tag is the name of its class."""


class Hello(Frame):
    """The first frame of a front. Its form, and that of `Refusal`, never change."""

    protocol: str
    version: str
    config: Raw = Raw(b"\xc0")
    """The `EngineConfig` to build, for a child process; nil for a running engine."""


class Add(Frame):
    """A new request."""

    request: AddRequest
    long_prompt: list[Raw] = []
    """The prompt in pieces, where it is long; see `pagedcore.remote.long_prompts`."""


class Abort(Frame):
    """See `AbortRequest`."""

    request_id: str


class Finish(Frame):
    """See `FinishRequest`."""

    request_id: str
    num_tokens: int
    stop_reason: str | None


class Gather(Frame):
    """Requests after an opening one are planned together, until the closing one."""

    is_open: bool


class Call(Frame):
    """Anything that is not a request; `number` is unique in its connection."""

    number: int
    name: str
    arguments: dict[str, Any]


class Welcome(Frame):
    """The engine takes the front, and says what it is."""

    plan: EnginePlan
    info: ModelInfo
    engine: str
    """Value of the `engine` label on its metrics."""
    pid: int


class Refusal(Frame):
    """The engine takes no requests of this connection: not at all, or from now on."""

    fault: Fault


class Facts(Struct, omit_defaults=True):
    """What an update holds beside its tokens; see `RequestUpdate`."""

    new_logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    status: Status = "running"
    error: Fault | None = None
    cache: CacheReport | None = None
    timings: RequestTimings | None = None
    num_preemptions: int = 0


class Update(Struct, array_like=True, gc=False):
    """One `RequestUpdate`; most of them are an id and a token."""

    request_id: str
    new_token_ids: list[int]
    facts: Facts | None = None


class Updates(Frame):
    """All updates of a step, or of several that piled up, for one connection."""

    items: list[Update]


class Answer(Frame):
    """What the call of this number returned or raised."""

    number: int
    content: Raw
    fault: Fault | None = None


class Numbers(Frame):
    """What the engine counted since the last ones: the calls that a `Sink` got."""

    adds: list[tuple[Key, float]] = []
    sets: list[tuple[Key, float]] = []
    observations: list[tuple[Key, dict[int, int], float, dict[int, Exemplar]]] = []
    ended: list[tuple[str, bool]] = []
    """Choices whose end is counted in these numbers, and whether that of their whole request is."""


FromFront = Hello | Add | Abort | Finish | Gather | Call
FromEngine = Welcome | Refusal | Updates | Answer | Numbers

_encoder = msgspec.msgpack.Encoder()
_from_front: msgspec.msgpack.Decoder[FromFront] = msgspec.msgpack.Decoder(FromFront)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

encode = _encoder.encode
decode_from_front = _from_front.decode
"""Raises `msgspec.MsgspecError`, as the next one does."""
decode_from_engine = _from_engine.decode


def protocol() -> str:
    """Equal where both sides mean the same by every field that travels."""
    fields = [(kind.__name__, field.name, str(field.type)) for kind in _TRAVELLERS for field in dataclasses.fields(kind)]
    return "2-" + hashlib.sha256(repr(fields).encode()).hexdigest()[:16]


def to_wire(update: RequestUpdate) -> Update:
    """An update as a frame holds it."""
    if update.has_tokens_only:
        return Update(update.request_id, update.new_token_ids)
    facts = {name: value for name, value in vars(update).items() if name not in ("request_id", "new_token_ids")}
    if update.error is not None:
        facts["error"] = fault_of(update.error)
    return Update(update.request_id, update.new_token_ids, Facts(**facts))


def from_wire(update: Update) -> RequestUpdate:
    """The same again."""
    facts = update.facts
    if facts is None:
        return RequestUpdate(update.request_id, update.new_token_ids)
    given = {name: value for name in Facts.__struct_fields__ if (value := getattr(facts, name)) is not None}
    if facts.error is not None:
        given["error"] = engine_error_of(facts.error)
    return RequestUpdate(update.request_id, update.new_token_ids, **given)
