"""One streamed completion over HTTP, as an OpenAI-compatible server answers it: what came, and when."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pagedcore.errors import EngineError

READ_BYTES = 1 << 16
SHOWN_BYTES = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where completions are asked for."""

    url: str
    """Of the server, without /v1."""
    model: str
    api_key: str | None = None

    def head(self, num_bytes: int) -> bytes:
        parts = urlsplit(self.url)
        lines = [
            f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1",
            f"Host: {parts.netloc}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {num_bytes}",
            "Connection: close",
        ]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.url)
        is_secret = parts.scheme == "https"
        context = ssl.create_default_context() if is_secret else None
        return await asyncio.open_connection(parts.hostname, parts.port or (443 if is_secret else 80), ssl=context)


@dataclass(slots=True)
class Stream:
    """What one request has got so far; times in seconds of the monotonic clock."""

    sent_s: float
    arrivals: list[tuple[float, int | None]] = field(default_factory=list)
    """When bytes with at least one whole event of new tokens came, and how many tokens there were by then, if the server said so."""
    num_tokens: int | None = None
    """As the server's usage counts them; None until it says so."""
    is_done: bool = False

    def take(self, events: list[bytes], now_s: float) -> None:
        """Add the events that one read completed. Raises `EngineError` for one that tells of a failure."""
        brought_tokens = False
        for event in (json.loads(event) for event in events if not self._ends(event)):
            if "error" in event:
                raise EngineError(f"The server failed a request: {str(event['error'])[:SHOWN_BYTES]}")
            counts_more = self._count(event)
            brought_tokens = brought_tokens or _has_choice(event, counts_more)
        if brought_tokens:
            self.arrivals.append((now_s, self.num_tokens))

    def _count(self, event: dict[str, Any]) -> bool:
        """Whether its usage counts more tokens than were known."""
        usage, known = event.get("usage"), self.num_tokens or 0
        if usage is not None:
            self.num_tokens = usage["completion_tokens"]
        return (self.num_tokens or 0) > known

    def _ends(self, event: bytes) -> bool:
        self.is_done = self.is_done or event == b"[DONE]"
        return event == b"[DONE]"


async def stream_completion(endpoint: Endpoint, body: bytes) -> Stream:
    """Send one request on a connection of its own (its opening is timed too) and read it to its end.

    Raises `EngineError` for a reply that is no stream, that fails, or that ends early.
    """
    stream = Stream(time.monotonic())
    try:
        reader, writer = await endpoint.connect()
        try:
            writer.write(endpoint.head(len(body)) + body)
            lines = EventLines()
            async for data in _body(reader):
                stream.take(lines.push(data), time.monotonic())
        finally:
            writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:
        raise EngineError(f"The server at {endpoint.url} broke off a request: {error}") from error
    if not stream.is_done or not stream.arrivals:
        raise EngineError(f"The server at {endpoint.url} ended a stream early.")
    if stream.num_tokens is None:
        raise EngineError(
            f"The server at {endpoint.url} sent no usage, though stream_options.include_usage asks for it: no tokens are counted."
        )
    return stream


class EventLines:
    """Cuts bytes into the data of server-sent events, whatever pieces they come in."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[bytes]:
        """The events that are whole now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class ChunkedBody:
    """Takes the chunks' sizes out of a body with Transfer-Encoding: chunked, whatever pieces it comes in."""

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0
        """Bytes of the open chunk that are still to come, and then its line end."""

    def push(self, data: bytes) -> bytes:
        """The payload in these bytes."""
        self._rest += data
        payload = b""
        while self._rest:
            if self._left > 2:
                piece = self._rest[: self._left - 2]
                payload, self._rest, self._left = payload + piece, self._rest[len(piece) :], self._left - len(piece)
            elif self._left:
                cut = min(self._left, len(self._rest))
                self._rest, self._left = self._rest[cut:], self._left - cut
            elif not self._open_chunk():
                break
        return payload

    def _open_chunk(self) -> bool:
        line, end, rest = self._rest.partition(b"\r\n")
        if not end:
            return False
        self._rest, self._left = rest, int(line.partition(b";")[0], 16) + 2
        return True


async def _body(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Pieces of the body as they come. Raises `EngineError` for another status than 200."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status, *fields = head.split("\r\n")
    chunks = ChunkedBody() if any(_is_chunked(line) for line in fields) else None
    code = status.split(" ")[1]
    if code != "200":
        rest = await reader.read(READ_BYTES)
        shown = (rest if chunks is None else chunks.push(rest))[:SHOWN_BYTES].decode(errors="replace")
        raise EngineError(f"The server answered a request with HTTP {code}: {shown}")
    while data := await reader.read(READ_BYTES):
        yield data if chunks is None else chunks.push(data)


def _is_chunked(line: str) -> bool:
    name, _, value = line.partition(":")
    return name.strip().lower() == "transfer-encoding" and "chunked" in value.lower()


def _has_choice(event: dict[str, Any], counts_more: bool) -> bool:
    """Whether it carries a choice with something new; the last usage record carries none."""
    return any(
        counts_more or choice.get("text") or choice.get("token_ids") or choice.get("finish_reason") for choice in event.get("choices", ())
    )
