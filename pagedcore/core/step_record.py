"""What has happened since the engine last asked."""

from __future__ import annotations

from pagedcore.core.events import Event, StepEvents
from pagedcore.messages import RequestUpdate


class StepRecord:
    """Owns the updates and events that nobody has taken yet, and counters of rare paths since the start."""

    def __init__(self) -> None:
        self.updates: list[RequestUpdate] = []
        self.step = StepEvents(now_s=0.0)
        self.num_prefix_waits = 0
        self.num_bypasses = 0
        self.num_stalls = 0
        self.num_deferred_frees = 0

    def add(self, event: Event) -> None:
        """Append an event."""
        self.step.events.append(event)

    def take_updates(self) -> list[RequestUpdate]:
        """Hand over the updates and start a new list."""
        updates, self.updates = self.updates, []
        return updates

    def take_step(self) -> StepEvents:
        """Hand over the step and start a new one."""
        step, self.step = self.step, StepEvents(now_s=self.step.now_s)
        return step
