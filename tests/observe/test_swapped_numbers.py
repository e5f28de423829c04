"""What is counted of blocks in host memory, by hand-fed events."""

from __future__ import annotations

import dataclasses

from pagedcore.core.events import Admitted, Arrived, Preempted, Resumed
from pagedcore.host_tier.swapped import Swapped
from pagedcore.tracing.history import History
from support.observed import BLOCK_SIZE, Engine, FakeClock, make_add, make_finished, make_lookup


def test_hits_in_host_memory_are_a_source_of_their_own() -> None:
    engine = Engine()
    lookup = dataclasses.replace(
        make_lookup("x", live=1, pool=2), host_blocks=3, num_prompt_tokens=7 * BLOCK_SIZE + 1, num_eligible_blocks=7
    )
    engine.serve("r", lookup)
    hits = [engine.value("pagedcore_prefix_cache_hit_tokens_total", source=source, tenant="") for source in ("live", "pool", "host")]
    assert hits == [BLOCK_SIZE, 2 * BLOCK_SIZE, 3 * BLOCK_SIZE]
    assert engine.value("pagedcore_cache_hit_rate") == 24 / 29
    assert engine.value("pagedcore_page_hits_total") == 3, "pages are those of the device"
    report = engine.recorder.cache_report("r")
    assert report is not None
    assert (report.live_tokens, report.pool_tokens, report.host_tokens, report.computed_tokens) == (4, 8, 12, 5)
    assert report.miss_blocks == {"cold": 1}


def test_blocks_are_counted_in_both_directions() -> None:
    engine = Engine()
    directions = ("out", "in")
    assert [engine.value("pagedcore_swapped_blocks_total", direction=d) for d in directions] == [0, 0]
    engine.step(num_swapped_out_blocks=3, num_swapped_in_blocks=1)
    engine.step(num_swapped_in_blocks=4)
    assert [engine.value("pagedcore_swapped_blocks_total", direction=d) for d in directions] == [3, 5]
    before = engine.recorder.stats()
    engine.step(num_swapped_out_blocks=2)
    assert (engine.recorder.stats() - before).swapped_blocks == {"out": 2, "in": 0}


def test_each_open_request_is_in_one_state() -> None:
    engine = Engine()
    engine.step(num_running=3, num_waiting=5, num_swapped=2)
    assert [engine.value("pagedcore_open_requests", state=s) for s in ("running", "waiting", "swapped")] == [3, 3, 2]
    assert engine.recorder.stats().num_waiting == 5


def test_a_swapped_request_has_its_two_events_with_their_times() -> None:
    clock = FakeClock()
    engine = Engine(clock=clock)
    history = History(engine.recorder.cache_report, clock=clock)
    engine.recorder.add_listener(history.record)
    request = make_add("r")
    engine.step(Arrived(request, 1001.0), Admitted("r", 1002.0, make_lookup("a", "b")))
    engine.step(Preempted("r", 1003.0, 8, 1.0, 0.5), Swapped("r", 1004.0, "out", 2), Swapped("unknown", 1004.0, "out", 1))
    engine.step(Resumed("r", 1006.0, 0), Swapped("r", 1006.0, "in", 2), make_finished(request, 1007.0))
    record = history.find("r")
    assert record is not None
    events = [(event["name"], event["t_ms"], event.get("num_blocks")) for event in record["events"]]
    assert [event for event in events if event[0].startswith("swapped")] == [("swapped_out", 4000.0, 2), ("swapped_in", 6000.0, 2)]
    assert [name for name, _, _ in events].index("resumed") < [name for name, _, _ in events].index("swapped_in")
