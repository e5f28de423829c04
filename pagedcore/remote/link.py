"""A front's side of one connection to an engine in another process."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import msgspec

from pagedcore.config import EngineConfig
from pagedcore.errors import EngineUnreachableError, NoAnswerError, PagedCoreError
from pagedcore.remote.channel import Channel
from pagedcore.remote.faults import engine_error_of, error_of
from pagedcore.remote.frames import Answer, Call, Frame, Hello, Numbers, Refusal, Welcome, decode_from_engine, encode, protocol
from pagedcore.remote.long_prompts import UnpackedAdd

CALL_TIMEOUT_S = 30.0

T = TypeVar("T")


def _frames(items: list[Any]) -> Iterator[bytes]:
    """What is left to pack is packed here, on the channel's thread."""
    return (item.frame() if isinstance(item, UnpackedAdd) else item for item in items)


class Link:
    """Owns the connection and the calls that wait for an answer. Frames may be sent from any thread; one reads."""

    def __init__(self, sock: socket.socket, *, config: EngineConfig | None = None, timeout_s: float | None = None) -> None:
        """Wait for the engine's welcome: for ever, or for `timeout_s`. `config` is what a child process builds.

        Raises the error with which the engine refuses, and `EngineUnreachableError` when there is no answer.
        """
        self._channel = Channel(sock, _frames, name="engine")
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[msgspec.Raw]] = {}
        self._loss: PagedCoreError | None = None
        self._early: list[Numbers] = []
        """Counted before the welcome."""
        try:
            self.welcome = self._shake_hands(config, timeout_s)
        except BaseException:
            self._channel.close()
            raise

    def send(self, frame: Frame) -> None:
        """Raises `TypeError` for what a frame cannot hold."""
        self.send_encoded(encode(frame))

    def send_encoded(self, frame: bytes | UnpackedAdd) -> None:
        self._channel.put(frame)

    def call(self, name: str, kind: type[T] | Any = Any, *, timeout_s: float = CALL_TIMEOUT_S, **arguments: Any) -> T:
        """What a function of the engine returns, as a `kind`. Raises what it raises, or `NoAnswerError` when it takes too long."""
        number, future = next(self._numbers), Future[msgspec.Raw]()
        self._waiting[number] = future
        try:
            if self._loss is not None:
                raise self._loss
            self.send(Call(number, name, arguments))
            content = future.result(timeout_s)
        except TimeoutError:
            raise NoAnswerError(f"The engine process did not answer {name!r} within {timeout_s:g} s.") from None
        finally:
            self._waiting.pop(number, None)
        result: T = msgspec.msgpack.decode(content, type=kind)
        return result

    def frames(self) -> Iterator[Any]:
        """What the engine sends, but for answers, which their callers get; ends with the connection."""
        yield from self._early
        while (body := self._channel.read()) is not None:
            frame = decode_from_engine(body)
            if isinstance(frame, Answer):
                self._answer(frame)
            else:
                yield frame

    def lose(self, error: PagedCoreError) -> None:
        """The connection has ended: calls that wait raise the error, and the socket goes back."""
        self._loss = error
        self._channel.close()
        while self._waiting:
            self._waiting.popitem()[1].set_exception(error)

    def finish(self) -> None:
        """Say no more; the engine ends what runs, says so, and ends the connection."""
        self._channel.finish()

    def abort(self) -> None:
        """End the connection at once."""
        self._channel.abort()

    def detach(self) -> int:
        """See `Channel.detach`."""
        return self._channel.detach()

    def _shake_hands(self, config: EngineConfig | None, timeout_s: float | None) -> Welcome:
        from pagedcore import __version__

        self._channel.set_timeout(timeout_s)
        self.send(Hello(protocol(), __version__, msgspec.Raw(encode(config))))
        while isinstance(frame := self._first_frame(timeout_s), Numbers):
            self._early.append(frame)
        if isinstance(frame, Refusal):
            raise engine_error_of(frame.fault)
        if not isinstance(frame, Welcome):
            raise EngineUnreachableError(f"What answers there is no engine: it began with {type(frame).__name__}.")
        self._channel.set_timeout(None)
        return frame

    def _first_frame(self, timeout_s: float | None) -> Any:
        try:
            body = self._channel.read()
        except TimeoutError:
            raise EngineUnreachableError(f"The engine did not answer within {timeout_s:g} s.") from None
        if body is None:
            raise EngineUnreachableError("The engine process ended the connection before its first answer.")
        try:
            return decode_from_engine(body)
        except msgspec.DecodeError as error:
            raise EngineUnreachableError(f"What answers there is no engine: {error}.") from error

    def _answer(self, answer: Answer) -> None:
        future = self._waiting.pop(answer.number, None)
        if future is None:
            return  # it came too late
        if answer.fault is None:
            future.set_result(answer.content)
        else:
            future.set_exception(error_of(answer.fault))


class LinkSource(Protocol):
    """Where links to one engine come from."""

    is_owner: bool
    """The engine is this front's alone, lives as long as it, and counts into its registry."""

    def open(self) -> Link:
        """The first link. Raises why there is none."""
        ...

    def reopen(self, stop: threading.Event) -> Link | None:
        """Another link after a loss, however long it takes; None once `stop` is set. Raises `EngineError` to give up."""
        ...

    outlook: str
    """A sentence for who asks while there is no link."""

    def explain_loss(self) -> str:
        """A sentence: how the link of a moment ago was lost."""
        ...

    def close(self, timeout_s: float) -> None:
        """The front is closed and its link has ended."""
        ...
