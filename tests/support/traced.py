"""One request whose life is known to the millisecond, and lives by hand."""

from __future__ import annotations

from typing import Any

from pagedcore.core.events import Admitted, Arrived, Event, FirstToken, PassedOver, Preempted, PrefillChunk, Resumed
from pagedcore.messages import AddRequest
from pagedcore.tracing.history import History
from pagedcore.tracing.life import Life
from pagedcore.tracing.tracer import Tracer
from support.observed import Engine, make_add, make_finished, make_lookup

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"


class TracedEngine(Engine):
    """A recorder with a tracer, fed by hand on a clock that starts at 1000 s."""

    def __init__(self, **info: Any) -> None:
        super().__init__(**info)
        self.tracer = Tracer(self.recorder, clock=self.clock)

    @property
    def history(self) -> History:
        return self.tracer.history

    def at(self, now_s: float, *events: Event, **facts: Any) -> None:
        """One batch of events at a moment."""
        self.clock.now_s = now_s
        self.step(*events, **facts)


def preempted_request(name: str = "r", **fields: Any) -> AddRequest:
    return make_add(name, num_tokens=13, **{"arrival_s": 1000.0, "tenant": "acme", "request_class": "chat", **fields})


def live_through_a_preemption(engine: TracedEngine, request: AddRequest, *, until_s: float = 1e9) -> None:
    """13 prompt tokens in blocks of 4, of which the first is cached: waits for four things, is preempted once, and writes 5 tokens.

    It stands in the queue from 1000.0 to 1001.4 and from 1001.6 to 1002.0, and ends at 1002.6. Stops short at `until_s`.
    """
    name = request.request_id
    batches: list[tuple[float, list[Event], dict[str, Any]]] = [
        (1000.1, [Arrived(request, 1000.1)], {}),
        (1000.2, [], {"planned_s": 1000.2, "stop_key": (0, "max_num_seqs")}),
        (1000.5, [], {"planned_s": 1000.5, "stop_key": (0, "token_budget")}),
        (1000.9, [PassedOver(name, 1000.9)], {"planned_s": 1000.9}),
        (
            1001.5,
            [
                Admitted(name, 1001.4, make_lookup("a", "b", live=1)),
                PrefillChunk(name, 1001.4, 9),
                FirstToken(name, 1001.5),
            ],
            {"planned_s": 1001.4, "step_id": 0, "submitted_s": 1001.41, "num_tokens": 9, "num_prefill_tokens": 9, "num_sequences": 1},
        ),
        (1001.6, [Preempted(name, 1001.6, 13, 0.9, 0.5)], {"planned_s": 1001.6, "stop_key": (0, "blocks")}),
        (1002.0, [Resumed(name, 1002.0, 8), PrefillChunk(name, 1002.0, 8)], {"planned_s": 1002.0}),
        (
            1002.6,
            [
                make_finished(
                    request,
                    1002.6,
                    num_output_tokens=5,
                    num_computed_prompt_tokens=9,
                    num_preemptions=1,
                    first_token_s=1001.5,
                    last_token_s=1002.5,
                    num_held_blocks=5,
                    num_new_blocks=4,
                )
            ],
            {"step_id": 1, "submitted_s": 1002.0, "num_tokens": 9, "num_sequences": 1, "num_running": 0},
        ),
    ]
    for now_s, events, facts in batches:
        if now_s <= until_s:
            engine.at(now_s, *events, **facts)


def preempted_life(**fields: Any) -> Life:
    """That life, ended."""
    engine = TracedEngine()
    live_through_a_preemption(engine, preempted_request(**fields))
    (life,) = engine.history.lives()
    return life
