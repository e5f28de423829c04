"""Traces of traffic: JSON lines, one served request each, the same from a live engine or from somebody's own log.

::

    {"request_id": "a1", "arrival_s": 12.5, "prompt_token_ids": [1, 2, 3], "num_output_tokens": 20,
     "admitted_s": 12.6, "finished_s": 14.0, "tenant": "acme", "cache_salt": null, "is_greedy": false}

The first four are needed; fields of other names are passed over, since a log may hold more. Times are seconds on any one clock.
Without `admitted_s` a request begins when it arrives, without `finished_s` it ends at once: then nothing runs together, and what a
pool needs for that is not seen. `tenant` and `cache_salt` keep prompts apart as in the engine. Greedy requests answer the same
prompt with the same tokens. A trace holds the prompts of all tenants: it is for operators.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcore.errors import ConfigError
from pagedcore.shown import shown

MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """One line of a trace."""

    request_id: str
    arrival_s: float
    prompt_token_ids: list[int]
    num_output_tokens: int
    admitted_s: float | None = None
    finished_s: float | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    is_greedy: bool = False

    @property
    def start_s(self) -> float:
        return self.arrival_s if self.admitted_s is None else self.admitted_s

    @property
    def end_s(self) -> float:
        return self.start_s if self.finished_s is None else max(self.finished_s, self.start_s)


class TraceWriter:
    """Owns a trace file that grows. Raises `ConfigError` for a file that cannot be opened."""

    def __init__(self, path: str | Path) -> None:
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  it stays open until `close`
        except OSError as error:
            raise ConfigError(f"The trace file {str(path)!r} cannot be written: {error.strerror}.") from error

    def write(self, request: TracedRequest) -> None:
        """Append one line. Raises `OSError`."""
        self._file.write(json.dumps(dataclasses.asdict(request), separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Everything is in the file. May be called twice. Raises `OSError`."""
        self._file.close()


def read_trace(path: str | Path) -> Iterator[TracedRequest]:
    """The requests of a trace, line by line. Raises `ConfigError` that names the first line which is none."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _read_line(line, f"Line {number} of {str(path)!r}")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"The trace {str(path)!r} cannot be read: {reason}.") from error


def _read_line(line: str, where: str) -> TracedRequest:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}; a trace has one JSON object a line.") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is {shown(fields)} and must be a JSON object.")
    known = {field.name for field in dataclasses.fields(TracedRequest)}
    for name in ("request_id", "arrival_s", "prompt_token_ids", "num_output_tokens"):
        if name not in fields:
            raise ConfigError(f"{where} has no {name}.")
    for name, value in fields.items():
        if name in known and not _is_valid(name, value):
            raise ConfigError(f"{where}: {name} is {shown(value)} and must be {_FORMS[name]}.")
    return TracedRequest(**{name: value for name, value in fields.items() if name in known})


_FORMS = {
    "request_id": "a text",
    "arrival_s": "a number of seconds",
    "prompt_token_ids": "a list of at least one token id",
    "num_output_tokens": "a number of tokens from 0",
    "admitted_s": "a number of seconds or null",
    "finished_s": "a number of seconds or null",
    "tenant": "a text or null",
    "cache_salt": "a text or null",
    "is_greedy": "true or false",
}


def _is_valid(name: str, value: Any) -> bool:
    if name == "prompt_token_ids":
        return isinstance(value, list) and bool(value) and all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in value)
    if name == "num_output_tokens":
        return type(value) is int and value >= 0
    if name == "is_greedy":
        return isinstance(value, bool)
    if name == "request_id":
        return isinstance(value, str)
    if value is None:
        return name != "arrival_s"
    return isinstance(value, str) if name in ("tenant", "cache_salt") else type(value) in (int, float) and math.isfinite(value)
