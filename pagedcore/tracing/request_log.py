"""The request log: one JSON line for each request that ended."""

from __future__ import annotations

import datetime
import json
import logging
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from pagedcore.errors import ConfigError
from pagedcore.guard import Guard
from pagedcore.tracing.life import Life
from pagedcore.tracing.record import facts_of

STANDARD_OUTPUT = "-"

logger = logging.getLogger(__name__)


class RequestLog:
    """Owns the file (or standard output) that the lines go to. Used by one thread.

    Of each `1 / sample` requests one is written, chosen by its caller's id, so that the choices of one request stay together;
    failed ones and those slower than `slow_ms` always are. When a line cannot be written, that is said once and the line is lost.
    """

    def __init__(
        self,
        path: str,
        *,
        model_name: str,
        engine: str,
        sample: float = 1.0,
        slow_ms: float | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Raises `ConfigError` for a file that cannot be opened."""
        self._labels = {"model": model_name, "engine": engine}
        self._sample = sample
        self._slow_ms = slow_ms
        self._wall = wall
        self._file = _open(path)
        self._has_torn_line = False
        self._guard = Guard("An ended request has no line in the request log.")
        self.num_lost = 0

    def take(self, lives: Sequence[Life]) -> None:
        """Write the lines of those that are kept, in one go: several processes may append to one file."""
        lines: list[bytes] = []
        for life in lives:
            self._guard(self._add_line, life, lines)
        if lines:
            self._write(b"".join(lines), len(lines))

    def keeps(self, life: Life) -> bool:
        """Whether a request that ended has a line."""
        seconds = life.since_arrival_s(life.finished_s) or 0.0
        is_slow = self._slow_ms is not None and seconds * 1000.0 >= self._slow_ms
        return is_slow or life.status in ("error", "rejected") or _share(life.request.group_id) < self._sample

    def close(self) -> None:
        """The last line is on the disk."""
        self._file.close()

    def _add_line(self, life: Life, lines: list[bytes]) -> None:
        if self.keeps(life):
            lines.append(self._line(life))

    def _line(self, life: Life) -> bytes:
        time_text = datetime.datetime.fromtimestamp(self._wall(), datetime.UTC).isoformat(timespec="milliseconds")
        return json.dumps({"time": time_text, **self._labels, **facts_of(life)}, separators=(",", ":")).encode() + b"\n"

    def _write(self, data: bytes, num_lines: int) -> None:
        unwritten = memoryview(b"\n" + data if self._has_torn_line else data)
        size = len(unwritten)
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
            self._file.flush()
            self._has_torn_line = False
        except (OSError, ValueError) as error:  # the latter: standard output is closed
            self._has_torn_line = self._has_torn_line or 0 < len(unwritten) < size
            if not self.num_lost:
                logger.error("The request log cannot be written and loses lines until it can be: %s", error)
            self.num_lost += num_lines


class _Lines(Protocol):
    """A raw file: `write` may take a part."""

    def write(self, data: memoryview, /) -> int: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class _StandardOutput:
    """What `sys.stdout` is at each moment: a host may have put something else there."""

    def write(self, data: memoryview, /) -> int:
        sys.stdout.write(bytes(data).decode())
        return len(data)

    def flush(self) -> None:
        sys.stdout.flush()

    def close(self) -> None:
        """It is not ours to close."""


def _open(path: str) -> _Lines:
    if path == STANDARD_OUTPUT:
        return _StandardOutput()
    try:
        return Path(path).open("ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"request_log is {path!r}, which cannot be opened: {error}; name a file in a folder that exists.") from error


def _share(request_id: str) -> float:
    """A number in [0, 1) that belongs to an id, spread evenly over many ids."""
    return zlib.crc32(request_id.encode("utf-8", "surrogatepass")) / 2**32
