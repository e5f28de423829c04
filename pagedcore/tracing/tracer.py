"""What one engine remembers of its requests, and where else it tells of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedcore.config import EngineConfig
from pagedcore.core.events import StepEvents
from pagedcore.errors import ConfigError
from pagedcore.observe.recorder import Recorder
from pagedcore.tracing.chrome import chrome_trace
from pagedcore.tracing.history import History
from pagedcore.tracing.otlp import otlp_provider
from pagedcore.tracing.request_log import RequestLog
from pagedcore.tracing.spans import Spans
from pagedcore.tracing.writer import Taker, Writer


class Tracer:
    """Owns the history of one engine and, where they are asked for, the log and the spans of its requests.

    `record` belongs to the engine thread; the other methods may be called from any.
    """

    def __init__(self, recorder: Recorder, config: EngineConfig | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Listens to the recorder from now on. Raises `ConfigError` for a log that cannot be opened, `MissingExtraError` for spans."""
        config = config or EngineConfig()
        self._clock = clock
        self._engine_name = f"{recorder.engine} ({recorder.model_name})"
        provider = None if config.otlp_endpoint is None else otlp_provider(config.otlp_endpoint, recorder.engine)
        self._spans = Spans(recorder.model_name, provider, clock=clock)
        # Spans first: the log shows the ids of the traces that they begin.
        self._takers: list[Taker] = [self._spans]
        if config.request_log is not None:
            self._takers.append(_open_log(config.request_log, config, recorder))
        self._writer = Writer(self._takers) if config.request_log is not None or provider is not None else None
        self.history = History(recorder.cache_report, clock=clock)
        recorder.add_listener(self.record)

    def record(self, step: StepEvents) -> None:
        """Note what happened, and hand on who ended where somebody wants to know."""
        ended = self.history.record(step)
        if not ended:
            return
        if self._writer is None and self._spans.has_provider:  # the host may set one at any time
            self._writer = Writer(self._takers)
        if self._writer is not None:
            for life in ended:
                self._writer.put(life)

    def chrome_trace(self) -> dict[str, Any]:
        """The remembered requests and steps in the Trace Event Format, as one JSON object."""
        return chrome_trace(self.history.lives(), self.history.steps(), engine_name=self._engine_name, now_s=self._clock())

    def write(self, path: str | Path) -> None:
        """Write `chrome_trace` to a file, which ui.perfetto.dev and chrome://tracing open.

        Raises `ConfigError` for a file that cannot be written.
        """
        try:
            Path(path).write_text(json.dumps(self.chrome_trace()), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"The trace cannot be written to {str(path)!r}: {error.strerror}; choose another file.") from error

    def close(self) -> None:
        """What ended is in the log, and its spans are sent. The history can still be asked."""
        if self._writer is not None:
            self._writer.close()


def _open_log(path: str, config: EngineConfig, recorder: Recorder) -> RequestLog:
    return RequestLog(
        path,
        model_name=recorder.model_name,
        engine=recorder.engine,
        sample=config.request_log_sample,
        slow_ms=config.slow_request_ms,
    )
