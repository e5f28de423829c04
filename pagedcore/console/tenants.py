"""Who asks for how much, and who waits: the open requests and the last minute of each tenant."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagedcore.console.minute import Minute, percentile
from pagedcore.core.events import Admitted, Arrived, Event, Finished, FirstToken, Preempted, Resumed, StepEvents
from pagedcore.guard import Guard
from pagedcore.messages import AddRequest
from pagedcore.observe.labels import MAX_TENANTS, BoundedLabel


@dataclass(slots=True)
class _Second:
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Tenant:
    minute: Minute[_Second] = field(default_factory=lambda: Minute(_Second))
    num_waiting: int = 0
    num_running: int = 0
    priority: int = 0
    """Of its latest request."""


@dataclass(slots=True)
class _Open:
    request: AddRequest
    tenant: _Tenant
    is_running: bool = False

    def move(self, *, is_running: bool) -> None:
        """From waiting to running or back."""
        if is_running != self.is_running:
            self.is_running = is_running
            self.tenant.num_running += 1 if is_running else -1
            self.tenant.num_waiting += -1 if is_running else 1


class TenantBook:
    """Owns the counts of at most `MAX_TENANTS` tenants; those that come later are "other", as in the metrics.

    `record` belongs to the engine thread, `summary` to any. Each choice of n waits and runs by itself; its prompt counts once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._guard = Guard("Something that happened to a request is not in the summary of its tenant.")
        self._label = BoundedLabel(MAX_TENANTS)
        self._tenants: dict[str, _Tenant] = {}
        self._open: dict[str, _Open] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            Arrived: self._arrived,
            Admitted: self._admitted,
            FirstToken: self._first_token,
            Preempted: lambda event: self._move(event.request_id, is_running=False),
            Resumed: lambda event: self._move(event.request_id, is_running=True),
            Finished: self._finished,
        }

    def record(self, step: StepEvents) -> None:
        """Count one batch of events; what a step does for each token is none of them."""
        if not step.events:
            return
        with self._lock:
            self._guard.each(self._handle, step.events)

    def summary(self) -> list[dict[str, Any]]:
        """The tenants that have open requests or had any in the last minute, who has most of them open first."""
        now_s = self._clock()
        with self._lock:
            found = [_row(name, tenant, tenant.minute.until(now_s)) for name, tenant in self._tenants.items()]
        busy = [row for row in found if row["num_waiting"] or row["num_running"] or row["prompt_tokens"] or row["output_tokens"]]
        return sorted(busy, key=lambda row: (-row["num_waiting"] - row["num_running"], -row["prompt_tokens"], row["tenant"]))

    # ---- under the lock

    def _handle(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def _arrived(self, event: Arrived) -> None:
        request = event.request
        if request.request_id in self._open:
            return  # an id in use: it is refused
        tenant = self._tenants.setdefault(self._label.value(request.tenant), _Tenant())
        tenant.num_waiting += 1
        tenant.priority = request.priority
        self._open[request.request_id] = _Open(request, tenant)

    def _admitted(self, event: Admitted) -> None:
        self._move(event.request_id, is_running=True)
        found = self._open.get(event.request_id)
        if found is not None and found.request.choice_index == 0:
            found.tenant.minute.at(event.now_s).num_prompt_tokens += len(found.request.prompt_token_ids)

    def _first_token(self, event: FirstToken) -> None:
        found = self._open.get(event.request_id)
        if found is not None and found.request.choice_index == 0:
            found.tenant.minute.at(event.now_s).ttfts_s.append(event.now_s - found.request.arrival_s)

    def _finished(self, event: Finished) -> None:
        found = self._open.get(event.request.request_id)
        if found is None or found.request is not event.request:
            return
        del self._open[event.request.request_id]
        found.tenant.minute.at(event.now_s).num_output_tokens += event.num_output_tokens
        if found.is_running:
            found.tenant.num_running -= 1
        else:
            found.tenant.num_waiting -= 1

    def _move(self, request_id: str, *, is_running: bool) -> None:
        found = self._open.get(request_id)
        if found is not None:
            found.move(is_running=is_running)


def _row(name: str, tenant: _Tenant, seconds: list[_Second]) -> dict[str, Any]:
    ttfts_s = sorted(ttft_s for second in seconds for ttft_s in second.ttfts_s)
    return {
        "tenant": name,
        "num_waiting": tenant.num_waiting,
        "num_running": tenant.num_running,
        "priority": tenant.priority,
        "prompt_tokens": sum(second.num_prompt_tokens for second in seconds),
        "output_tokens": sum(second.num_output_tokens for second in seconds),
        "ttft_p50_s": percentile(ttfts_s, 0.50),
        "ttft_p99_s": percentile(ttfts_s, 0.99),
    }
