"""The engine's side of one connection: a front's messages reach the engine, and what it says reaches the front."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pagedcore.config import EnginePlan
from pagedcore.errors import EngineClosedError, EngineError, EngineRefusedError, PagedCoreError, RequestError
from pagedcore.messages import AbortRequest, AddRequest, FinishRequest, InboxMessage, RequestUpdate, failed_update
from pagedcore.remote.calls import Calls
from pagedcore.remote.channel import Channel, Packer
from pagedcore.remote.faults import fault_of
from pagedcore.remote.frames import (
    Abort,
    Add,
    Answer,
    Call,
    Finish,
    Gather,
    Hello,
    Refusal,
    Welcome,
    decode_from_front,
    encode,
    protocol,
)
from pagedcore.remote.gatherings import Gatherings
from pagedcore.remote.long_prompts import request_of
from pagedcore.remote.request_ids import ClientIds, EngineIds

if TYPE_CHECKING:
    from pagedcore.async_engine import AsyncEngine

MAX_WAITING_UPDATES = 2**18
"""A front that leaves so many unread has stopped reading: it is cut off, so that the engine's memory does not fill up."""

NUM_CALL_THREADS = 4

MAX_WAITING_CALLS = 64
"""Of one front; a further one is refused, so that neither the engine's memory nor its time fills up with questions."""

NOTHING = msgspec.Raw(b"\xc0")
"""Nil: what an answer holds that is an error."""

logger = logging.getLogger(__name__)


class Desk:
    """What the connections of one engine share: the engine, its calls and the threads for them, the ids of its requests."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.calls = Calls(engine)
        self.ids = EngineIds()
        self.gatherings = Gatherings(engine.loop)
        self.threads = ThreadPoolExecutor(NUM_CALL_THREADS, thread_name_prefix="pagedcore-calls")
        self.refusal: str | None = None
        """Why no request is taken any more."""

    def close(self) -> None:
        """Answer no more calls."""
        self.threads.shutdown(wait=False, cancel_futures=True)


class Connection:
    """Owns the requests of one front, and ends them when it leaves. `serve` is its life."""

    def __init__(self, desk: Desk, channel: Channel, packer: Packer, number: int = 0) -> None:
        """`packer` is the channel's; `number` is unique among the connections of an engine."""
        self._desk = desk
        self._loop = desk.engine.loop
        self._channel = channel
        self._packer = packer
        self._number = number
        self._ids = ClientIds(desk.ids)
        self._num_posted = 0
        self._is_posting = False
        self._num_waiting_calls = 0
        self._compiling: dict[str, list[InboxMessage]] = {}
        """Requests whose grammars are being compiled, and what has been said of them meanwhile."""
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Welcome the front and do what it says, until it leaves; all its requests are aborted then."""
        self._channel.put(self._welcome())
        if self._desk.refusal is not None:
            self.refuse(self._desk.refusal)
        with ExitStack() as last:
            last.callback(self._leave)
            while (body := self._channel.read()) is not None:
                try:
                    self._take(decode_from_front(body))
                except msgspec.MsgspecError as error:
                    logger.warning("Front %d sent what is no message of ours and was cut off: %s", self._number, error)
                    self._channel.abort()

    def refuse(self, message: str) -> None:
        """Tell the front that no more requests are taken."""
        self._channel.put(Refusal(fault_of(EngineClosedError(message))))

    @property
    def num_open(self) -> int:
        """Requests of this front whose last update is not in its channel yet."""
        return len(self._ids.open_ids()) + self._is_posting  # in this order

    def _welcome(self) -> Welcome:
        """Each front draws its own seeds; the first one draws those of an engine in its process."""
        engine = self._desk.engine
        info = dataclasses.replace(engine.info, seed=engine.info.seed + self._number)
        return Welcome(_with_absolute_paths(engine.plan), info, self._loop.recorder.engine, os.getpid())

    def _take(self, frame: Any) -> None:
        if isinstance(frame, Add):
            self._add(request_of(frame))
        elif isinstance(frame, Call):
            self._call(frame)
        elif isinstance(frame, Gather):
            (self._desk.gatherings.begin if frame.is_open else self._desk.gatherings.end)(self)
        elif isinstance(frame, (Abort, Finish)):
            self._end(frame)

    def _add(self, request: AddRequest) -> None:
        try:
            if self._desk.refusal is not None:
                raise EngineClosedError(self._desk.refusal)
            opened = self._ids.open(request)
        except PagedCoreError as error:
            self._channel.put([_last_update(request.request_id, error)])
            return
        if request.params.structured_outputs is None:
            self._submit(opened)
        else:
            self._compiling[opened.request_id] = []
            self._desk.threads.submit(self._submit_slowly, opened)

    def _submit_slowly(self, request: AddRequest) -> None:
        """Submitting compiles the grammar, which may take a second: others of this front don't wait."""
        try:
            self._submit(request)
        except Exception as error:
            logger.error("Request %s could not be handed to the engine.", request.request_id, exc_info=error)
            self._post([_last_update(request.request_id, EngineError(f"{type(error).__name__}: {error}"))])
        with self._lock:
            for message in self._compiling.pop(request.request_id):
                self._submit(message)

    def _submit(self, message: InboxMessage) -> None:
        try:
            self._loop.submit(message, self._post)
        except EngineClosedError as error:  # of what runs it tells by itself
            if isinstance(message, AddRequest):
                self._post([_last_update(message.request_id, error)])

    def _end(self, frame: Abort | Finish) -> None:
        engine_id = self._ids.engine_id(frame.request_id)
        if engine_id is None:
            return  # it has just ended
        if isinstance(frame, Finish):
            self._tell(FinishRequest(engine_id, frame.num_tokens, frame.stop_reason))
        else:
            self._tell(AbortRequest(engine_id))

    def _tell(self, message: InboxMessage) -> None:
        with self._lock:
            if message.request_id in self._compiling:
                self._compiling[message.request_id].append(message)
                return
        self._submit(message)

    def _call(self, call: Call) -> None:
        with self._lock:
            is_one_too_many = self._num_waiting_calls >= MAX_WAITING_CALLS
            self._num_waiting_calls += not is_one_too_many
        if is_one_too_many:
            error = EngineError(
                f"{MAX_WAITING_CALLS} questions of this front wait for answers, which is the most; ask {call.name!r} later."
            )
            self._channel.put(Answer(call.number, NOTHING, fault_of(error)))
        else:
            self._desk.threads.submit(self._answer, call)

    def _answer(self, call: Call) -> None:
        try:
            answer = Answer(call.number, msgspec.Raw(encode(self._desk.calls.answer(call.name, call.arguments, self._ids))))
        except (PagedCoreError, AssertionError) as error:
            answer = Answer(call.number, NOTHING, fault_of(error))
        except Exception as error:
            logger.error("The call %r of front %d failed.", call.name, self._number, exc_info=error)
            answer = Answer(call.number, NOTHING, fault_of(error))
        with self._lock:
            self._num_waiting_calls -= 1
        self._channel.put(answer)

    def _post(self, updates: list[RequestUpdate]) -> None:
        """The outbox of this front's requests, on the engine thread."""
        self._is_posting = True
        try:
            self._ids.translate(updates)
            self._channel.put(updates)
        finally:
            self._is_posting = False
        self._num_posted += len(updates)
        if self._num_posted - self._packer.num_packed > MAX_WAITING_UPDATES:
            logger.warning("Front %d has not read the last %d updates and was cut off.", self._number, MAX_WAITING_UPDATES)
            self._channel.abort()

    def _leave(self) -> None:
        self._desk.gatherings.end(self)
        for engine_id in self._ids.open_ids():
            self._tell(AbortRequest(engine_id))


def read_hello(channel: Channel) -> Hello | None:
    """A front's first frame; None where it left, or was refused since it means something else by its messages."""
    body = channel.read()
    try:
        hello = None if body is None else decode_from_front(body)
    except msgspec.MsgspecError:
        hello = Hello(protocol="unknown", version="unknown")
    if isinstance(hello, Hello) and hello.protocol == protocol():
        return hello
    if isinstance(hello, Hello):
        channel.put(Refusal(fault_of(EngineRefusedError(_mismatch(hello.version)))))
    channel.finish()
    return None


def _last_update(request_id: str, error: PagedCoreError) -> RequestUpdate:
    return failed_update(request_id, error, "rejected" if isinstance(error, RequestError) else "error")


def _mismatch(version: str) -> str:
    from pagedcore import __version__

    return (
        f"The engine is pagedcore {__version__} and this process has pagedcore {version}, whose messages differ; "
        "run the same version on both sides."
    )


def _with_absolute_paths(plan: EnginePlan) -> EnginePlan:
    """The plan for a process with another working folder."""
    template = plan.config.chat_template
    if template is not None and len(template) < 1024 and "\n" not in template and Path(template).is_file():
        plan = dataclasses.replace(plan, config=plan.config.replace(chat_template=str(Path(template).absolute())))
    return dataclasses.replace(plan, model_dir=str(Path(plan.model_dir).absolute()), tokenizer_dir=str(Path(plan.tokenizer_dir).absolute()))
