"""Prompts through an engine: how a run ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pagedcore.commands.throughput import run_prompts
from pagedcore.errors import StepFailedError
from pagedcore.outputs import RequestOutput
from support.scripted_engine import ScriptedEngine


class HalfStuckEngine(ScriptedEngine):
    """The first request fails; the others last until the engine is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = threading.Event()
        self.first_token = 0

    def generate_sync(self, prompt: Any, *args: Any, **kwargs: Any) -> Iterator[RequestOutput]:
        if prompt[0] == self.first_token:
            raise StepFailedError("step 1 failed")
        assert self.closed.wait(60.0), "nobody closed the engine"
        yield from super().generate_sync(prompt, *args, **kwargs)

    def close_sync(self) -> None:
        self.closed.set()


def test_a_run_that_fails_or_is_stopped_does_not_wait_for_the_other_requests() -> None:
    engine = HalfStuckEngine()
    engine.first_token = 7
    with pytest.raises(StepFailedError):
        run_prompts(engine, [[7, 1], [8, 1], [9, 1], [10, 1]], 2, lambda: None)  # type: ignore[arg-type]
    assert engine.closed.is_set()
