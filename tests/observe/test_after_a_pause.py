"""What a pause of the recording leaves behind: gauges that are true, and misses that know what was lost meanwhile."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from pagedcore.core.events import Arrived, StepEvents
from pagedcore.engine_books import EngineBooks
from pagedcore.messages import AbortRequest, RequestUpdate
from pagedcore.observe.recorder import Recorder, RecorderInfo
from pagedcore.outputs import CacheReport
from pagedcore.tracing.steps import StepRing
from support.core_builders import make_request
from support.engine_builder import Built, make_engine
from support.observed import make_finished
from support.remote_engines import wait_for

LONG = {"max_model_len": 20_100, "num_blocks": 4096}
PROMPT = list(range(1, 42))
"""Five blocks, and a token that is always computed."""


class Caller:
    def __init__(self) -> None:
        self.told: list[RequestUpdate] = []
        self.has_begun, self.is_over = threading.Event(), threading.Event()

    def __call__(self, updates: list[RequestUpdate]) -> None:
        self.told += updates
        self.has_begun.set()
        if updates[-1].finish_reason is not None:
            self.is_over.set()


def begin(built: Built, request_id: str, prompt: list[int]) -> Caller:
    """A request that runs until somebody ends it."""
    caller = Caller()
    built.loop.submit(make_request(request_id, prompt, max_tokens=10_000), caller)
    assert caller.has_begun.wait(60)
    return caller


def ask(built: Built, request_id: str, prompt: list[int]) -> list[CacheReport]:
    """The cache reports that a caller gets: with its first update and with its last."""
    caller = Caller()
    built.loop.submit(make_request(request_id, prompt, max_tokens=3), caller)
    assert caller.is_over.wait(60)
    return [update.cache for update in caller.told if update.cache is not None]


def watched(built: Built, monkeypatch: pytest.MonkeyPatch) -> list[StepEvents]:
    """The batches that the recorder gets from now on."""
    batches: list[StepEvents] = []
    record = built.loop.recorder.record

    def watch(step: StepEvents) -> None:
        batches.append(step)
        record(step)

    monkeypatch.setattr(built.loop.recorder, "record", watch)
    return batches


def test_the_report_of_a_request_that_does_not_count_has_no_reasons_of_another_one_of_its_id() -> None:
    built = make_engine()
    assert [report.miss_blocks for report in ask(built, "a", PROMPT)] == [{"cold": 5}] * 2
    built.loop.pause_recording()
    assert [report.miss_blocks for report in ask(built, "a", [7] * 41)] == [{}] * 2
    built.loop.start_recording()
    assert [report.miss_blocks for report in ask(built, "a", [8] * 41)] == [{"cold": 5}] * 2
    built.engine.close_sync()


def test_a_request_that_counts_has_its_reasons_in_a_pause_too() -> None:
    built = make_engine(**LONG)
    caller = begin(built, "a", PROMPT)
    built.loop.pause_recording()
    built.loop.submit(AbortRequest("a"))
    assert caller.is_over.wait(60)
    last = caller.told[-1].cache
    assert last is not None
    assert last.miss_blocks == {"cold": 5}
    built.engine.close_sync()


def test_a_pause_in_which_nothing_counts_costs_the_books_nothing_and_leaves_true_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    built = make_engine(**LONG)
    built.loop.pause_recording()
    built.settle()
    batches = watched(built, monkeypatch)
    with built.loop.gathering():  # two at once: from here the queue is not empty until the last has ended
        callers = [Caller(), Caller()]
        for number, caller in enumerate(callers):
            built.loop.submit(make_request(f"r{number}", [number, 2], max_tokens=10_000), caller)
    wait_for(lambda: all(len(caller.told) > 50 for caller in callers), "some steps are done")
    assert batches == []
    built.loop.start_recording()
    assert [step.step_id for step in batches[:1]] == [None], "the state that the pause leaves comes first"
    assert batches[0].num_running == 2
    built.engine.close_sync()


def emptied_in_a_pause() -> Built:
    """One request from before the pause has ended in it, then one that does not count."""
    built = make_engine(**LONG)
    caller = begin(built, "a", PROMPT)
    built.loop.pause_recording()
    other = begin(built, "b", PROMPT[::-1])
    built.loop.submit(AbortRequest("a"))
    assert caller.is_over.wait(60)
    wait_for(lambda: built.engine.stats().num_running == 1, "the other is shown as long as one counts")
    built.loop.submit(AbortRequest("b"))
    assert other.is_over.wait(60)
    return built


def test_a_queue_that_empties_in_a_pause_is_empty_in_the_gauges_at_its_end() -> None:
    built = emptied_in_a_pause()
    built.loop.start_recording()
    stats = built.engine.stats()
    assert (stats.num_running, stats.num_active_blocks, stats.num_cached_blocks) == (0, 0, built.loop.pool.num_cached_blocks)
    built.engine.close_sync()


def test_an_engine_that_is_idle_in_a_pause_has_true_gauges_without_its_end() -> None:
    built = emptied_in_a_pause()
    wait_for(lambda: built.engine.stats().num_running == built.engine.stats().num_active_blocks == 0, "the gauges say so")
    built.engine.close_sync()


@pytest.mark.parametrize("how", ["evicted", "forgotten"])
def test_a_miss_after_a_pause_says_what_was_lost_in_it(how: str) -> None:
    built = make_engine(num_blocks=16)
    ask(built, "a", PROMPT)
    built.settle()
    built.loop.pause_recording()
    if how == "forgotten":
        assert built.loop.reset_prefix_cache()
    else:
        for number in range(6):
            ask(built, f"w{number}", [50 + number] * 60)
    built.loop.start_recording()
    assert built.engine.stats().pool_evictions == 0, "the evictions of a pause are not counted"
    report = ask(built, "a again", PROMPT)[-1]
    assert report.miss_blocks == ({"evicted": 5} if how == "evicted" else {"cold": 5})
    assert built.engine.stats().pool_ghost_hits == (5 if how == "evicted" else 0)
    built.engine.close_sync()


def books_of() -> tuple[Recorder, EngineBooks]:
    recorder = Recorder(RecorderInfo(model_name="m"), registry=CollectorRegistry())
    return recorder, EngineBooks(recorder)


def test_requests_that_were_lost_elsewhere_and_do_not_count_leave_the_books_as_they_are() -> None:
    recorder, books = books_of()
    books.start()
    lost = [make_finished(make_request(name, [1], is_traffic=is_traffic), 1.0, "error") for name, is_traffic in (("a", False), ("b", True))]
    books.take_lost(lost)
    books.record(StepEvents(now_s=1.0))
    assert books._traffic._num_others == 0
    assert recorder.stats().num_finished["error"] == 1
    recorder.close()


@pytest.mark.parametrize("has_open", [True, False], ids=["while a request counts", "while none does"])
@pytest.mark.parametrize(("submitted_s", "gap_s"), [(5.1, 0.1), (4.95, 0.0)], ids=["after the last step", "with two in flight"])
def test_the_first_step_after_a_pause_follows_the_last_one_of_it(submitted_s: float, gap_s: float, *, has_open: bool) -> None:
    recorder, books = books_of()
    ring = StepRing()
    recorder.add_listener(ring.record)
    books.start()
    arrived = [Arrived(make_request("a", [1]), 1.0)] if has_open else []
    books.record(StepEvents(now_s=1.0, submitted_s=0.9, step_id=1, num_running=1, events=arrived))
    books.pause()
    books.record(StepEvents(now_s=5.0, submitted_s=4.9, step_id=2, num_running=1))
    books.record(StepEvents(now_s=5.0, num_running=1))  # what happens after a step, and is none, has its time
    books.start()
    books.record(StepEvents(now_s=5.2, submitted_s=submitted_s, step_id=3, num_running=1))
    recorder.flush()
    exporter = recorder._exporter
    assert exporter is not None
    value = partial(exporter._registry.get_sample_value, labels={"model_name": "m", "engine": "0"})
    assert value("pagedcore_step_gap_seconds_count") == 1
    assert value("pagedcore_step_gap_seconds_sum") == pytest.approx(gap_s)
    assert value("pagedcore_step_seconds_sum") == pytest.approx(0.1 + 0.2 - gap_s)
    assert [step.step_id for step in ring.steps()] == [1, 3]
    assert ring.steps()[1].gap_s == pytest.approx(gap_s)
    recorder.close()
