"""What operators and hosts ask an engine, asked through a link: the same names as on the engine's own parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedcore.advice.advice import Advice
from pagedcore.console.inspector import Answer
from pagedcore.errors import ConfigError

Ask = Callable[..., Any]
"""A function of the engine by its name, the type of what it returns, and its arguments."""

Records = list[dict[str, Any]]


class RemoteInspector:
    """Stands where an `Inspector` does."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def answer(self, question: str, arguments: dict[str, Any]) -> Answer:
        """See `Inspector.answer`."""
        answer: Answer = self._ask("inspect", dict[str, Any], question=question, arguments=arguments)
        return answer


class RemoteHistory:
    """Stands where a `History` does, for its records."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def find(self, request_id: str) -> dict[str, Any] | None:
        """See `History.find`."""
        record: dict[str, Any] | None = self._ask("find", request_id=request_id)
        return record

    def recent(self, n: int = 100, search: str = "") -> Records:
        """See `History.recent`."""
        records: Records = self._ask("recent", Records, n=n, search=search)
        return records


class RemoteTracer:
    """Stands where a `Tracer` does, for what a host asks of it."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.history = RemoteHistory(ask)

    def write(self, path: str | Path) -> None:
        """See `Tracer.write`; the file is written here."""
        trace = self._ask("inspect", dict[str, Any], question="trace", arguments={})
        try:
            Path(path).write_text(json.dumps(trace), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"The trace cannot be written to {str(path)!r}: {error.strerror}; choose another file.") from error


class RemoteAdvisor:
    """Stands where an `Advisor` does, for what a host asks of it."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def advice(self) -> Advice:
        """See `Advisor.advice`."""
        advice: Advice = self._ask("advice", Advice)
        return advice

    def record_trace(self, path: str | Path | None) -> None:
        """See `Advisor.record_trace`; the engine's process writes the file."""
        self._ask("record_trace", path=None if path is None else str(Path(path).absolute()))
