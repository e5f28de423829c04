"""The engine's last steps, one small record each."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from pagedcore.core.events import StepEvents

MAX_STEPS = 8192
"""Steps remembered; half a minute of steps of 4 ms."""


class TracedStep(NamedTuple):
    """One device step, and the queue and the pool after it."""

    step_id: int
    began_s: float
    """When the device could begin: it was handed over, and the step before was done."""
    ended_s: float
    gap_s: float | None
    """Seconds from the end of the step before, while requests ran; None after an idle time."""
    num_tokens: int
    num_prefill_tokens: int
    num_sequences: int
    num_running: int
    num_waiting: int
    num_active_blocks: int
    num_cached_blocks: int
    num_free_blocks: int


class StepRing:
    """Owns the last `MAX_STEPS` steps."""

    def __init__(self) -> None:
        self._steps: deque[TracedStep] = deque(maxlen=MAX_STEPS)
        self._last_end_s: float | None = None
        self._was_busy = False

    def record(self, step: StepEvents) -> None:
        """Remember a step; what happened outside one is no step."""
        if step.step_id is not None:
            self._steps.append(self._traced(step, step.step_id))
        if step.step_id is not None or step.submitted_s is not None:  # the latter alone: a step of a pause
            self._last_end_s = step.now_s
        self._was_busy = step.num_running > 0

    def steps(self) -> list[TracedStep]:
        return list(self._steps)

    def _traced(self, step: StepEvents, step_id: int) -> TracedStep:
        last_end_s = self._last_end_s
        began_s = step.now_s if step.submitted_s is None else step.submitted_s
        if last_end_s is not None and began_s < last_end_s:
            began_s = last_end_s
        return TracedStep(
            step_id,
            began_s,
            step.now_s,
            began_s - last_end_s if self._was_busy and last_end_s is not None else None,
            step.num_tokens,
            step.num_prefill_tokens,
            step.num_sequences,
            step.num_running,
            step.num_waiting,
            step.num_active_blocks,
            step.num_cached_blocks,
            step.num_free_blocks,
        )
