"""A killed engine process takes nothing out of the books: each request that was sent to it ends there once, and no counter falls."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter, defaultdict
from typing import Any

import pytest

from pagedcore import SamplingParams
from pagedcore.async_engine import AsyncEngine
from pagedcore.client import ModelInfo, RequestContext
from pagedcore.core.scheduler import Scheduler
from pagedcore.engine_build import recorder_info, scheduler_limits
from pagedcore.engine_loop import EngineLoop, EngineParts
from pagedcore.errors import EngineClosedError, PromptTooLongError
from pagedcore.messages import AbortRequest, AddRequest, RequestUpdate, failed_update
from pagedcore.observe import recorder as recording
from pagedcore.observe.ledger import Key, Ledger
from pagedcore.remote import restarts
from pagedcore.remote.frames import Numbers, to_wire
from pagedcore.remote.lost_requests import LostBook, Uncounted, lost_ends
from pagedcore.remote.numbers import ForwardedNumbers, ForwardingRecorder
from pagedcore.remote.open_requests import OpenRequest, OpenRequests
from pagedcore.structured_outputs import StructuredOutputsParams
from support.core_builders import make_request
from support.engine_builder import make_plan
from support.fake_runner import VOCAB_SIZE, FakeRunner
from support.remote_engines import ENDLESS, Hosted, child_engine, child_pid, connected, run, wait_for

TOO_LONG = [1] * 5000


@pytest.fixture(autouse=True)
def _restart_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)


def samples(engine: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All of an engine's samples in this process' registry, as a scrape finds them."""
    from prometheus_client import REGISTRY

    return {
        (one.name, tuple(sorted((name, value) for name, value in one.labels.items() if name not in ("engine", "model_name")))): one.value
        for family in REGISTRY.collect()
        for one in family.samples
        if one.labels.get("engine") == engine
    }


def by_label(found: dict[Any, float], name: str, label: str) -> dict[str, float]:
    """The samples of a name that are not 0, summed over the other labels."""
    sums: Counter[str] = Counter()
    for (family, labels), value in found.items():
        if family == name:
            sums[dict(labels)[label]] += value  # type: ignore[assignment]
    return {value: count for value, count in sums.items() if count}


def fallen(earlier: dict[Any, float], later: dict[Any, float]) -> list[Any]:
    """Counters and parts of histograms that have become smaller, or are gone."""
    ends = ("_total", "_count", "_sum", "_bucket")
    return [key for key, value in earlier.items() if key[0].endswith(ends) and later.get(key, -1.0) < value]


def ending(engine: AsyncEngine, context: RequestContext | None = None, params: SamplingParams = ENDLESS, **options: Any) -> Any:
    """A stream that has begun."""
    stream = engine.generate_sync([1, 2, 3], params, context=context, **options)
    next(stream)
    return stream


def test_arrived_is_finished_and_rejected_and_open_across_a_kill() -> None:
    name = "lost-1"
    with child_engine(metrics_instance=name) as engine:
        for _ in range(2):
            run(engine, list(range(20)))
        assert run(engine, TOO_LONG).status == "rejected"
        left = ending(engine)
        left.close()
        wait_for(lambda: not engine.loop._requests._by_id, "its end has been heard")
        open_streams = [ending(engine, RequestContext(tenant="t", adapter="litserve")), ending(engine, params=ENDLESS.replace(n=2))]
        before = samples(name)
        os.kill(child_pid(engine), signal.SIGKILL)
        last = [[*stream][-1] for stream in open_streams]
        after = samples(name)
        assert [output.status for output in last] == ["error", "error"]
        assert by_label(after, "pagedcore_requests_total", "status") == {"completed": 2, "rejected": 1, "aborted": 1, "error": 2}
        assert by_label(after, "pagedcore_requests_total", "tenant") == {"": 5, "t": 1}
        assert by_label(after, "pagedcore_requests_total", "adapter") == {"library": 5, "litserve": 1}
        assert by_label(before, "pagedcore_received_requests_total", "adapter") == {"library": 5, "litserve": 1}, "each at once"
        assert by_label(after, "pagedcore_received_requests_total", "tenant") == {"": 5, "t": 1}
        assert by_label(after, "pagedcore_rejected_requests_total", "reason") == {"too_long": 1}
        assert after["pagedcore_request_latency_seconds_count", ()] == 5, "each but the rejected one"
        for gauge, label in (("pagedcore_open_requests", "state"), ("pagedcore_waiting_requests", "reason"), ("pagedcore_blocks", "state")):
            assert by_label(after, gauge, label) == {}
        assert not fallen(before, after)
        told = sum(len(choice.token_ids) for output in last for choice in output.outputs)
        assert sum(by_label(after, "pagedcore_generation_tokens_total", "tenant").values()) >= told + 24
        wait_for(lambda: asyncio.run(engine.is_ready()), "another process is there")
        assert run(engine, [1]).status == "completed"
        asyncio.run(engine.metrics_text())
        again = samples(name)
        assert by_label(again, "pagedcore_received_requests_total", "tenant") == {"": 6, "t": 1}
        assert by_label(again, "pagedcore_requests_total", "status") == {"completed": 3, "rejected": 1, "aborted": 1, "error": 2}
        assert not fallen(after, again)
    closed = samples(name)
    assert by_label(closed, "pagedcore_requests_total", "status") == {"completed": 3, "rejected": 1, "aborted": 1, "error": 2}
    assert not fallen(again, closed)


def test_lost_prompts_stay_in_the_partition_and_in_the_other_names() -> None:
    with child_engine(metrics_instance="lost-2", metrics_compat="vllm") as engine:
        stream = ending(engine)

        def num_looked_up() -> float:
            engine.loop.flush_metrics()
            return sum(by_label(samples("lost-2"), "pagedcore_prefix_cache_queries_tokens_total", "tenant").values())

        wait_for(lambda: num_looked_up() == 3, "its lookup is here")
        os.kill(child_pid(engine), signal.SIGKILL)
        assert [*stream][-1].status == "error"
        found = samples("lost-2")
        served = sum(by_label(found, "pagedcore_prefix_cache_hit_tokens_total", "source").values())
        told = [found[f"pagedcore_{kind}_prompt_tokens_total", ()] for kind in ("computed", "abandoned")]
        assert served + sum(told) == 3
        assert by_label(found, "vllm:request_success_total", "finished_reason") == {"error": 1}
        assert found["vllm:num_requests_running", ()] == 0


def test_what_only_warmed_the_cache_up_is_no_traffic_when_it_is_lost_either() -> None:
    with child_engine(metrics_instance="lost-3") as engine:
        engine.warm_up([[1, 2, 3]])
        engine.loop.pause_recording()
        stream = ending(engine)
        os.kill(child_pid(engine), signal.SIGKILL)
        assert [*stream][-1].status == "error"
        assert by_label(samples("lost-3"), "pagedcore_requests_total", "status") == {}
        wait_for(lambda: asyncio.run(engine.is_ready()), "another process is there")
        stream = ending(engine)
        os.kill(child_pid(engine), signal.SIGKILL)
        assert [*stream][-1].status == "error"
        assert by_label(samples("lost-3"), "pagedcore_requests_total", "status") == {"error": 1}, "the new one counts from its start"


def test_what_is_refused_there_or_never_came_there_is_counted_without_waiting_for_an_end() -> None:
    with child_engine(metrics_instance="lost-4") as engine:
        told: list[RequestUpdate] = []
        bad = make_request("bad", [1], structured_outputs=StructuredOutputsParams(regex="[ab"))
        engine.loop.submit(bad, told.extend)
        wait_for(lambda: told, "it is refused")
        assert [update.status for update in told] == ["rejected"]
        never_came = OpenRequest(make_request("never came", [1], tenant="t"), told.extend)
        engine.loop.count_lost(lost_ends([never_came], 1.0))

        def counts() -> dict[str, float]:
            engine.loop.flush_metrics()
            return by_label(samples("lost-4"), "pagedcore_requests_total", "status")

        wait_for(lambda: counts() == {"rejected": 1, "error": 1}, "both are in the numbers")
        assert by_label(samples("lost-4"), "pagedcore_received_requests_total", "tenant") == {"": 1, "t": 1}
        assert engine.loop._mirror is not None
        assert engine.loop._mirror.uncounted._choices == {}, "and nothing is kept for the end"


def test_an_engine_writes_down_what_the_one_before_it_took_along_and_nothing_else_changes(one: Hosted) -> None:
    with connected(one) as front:
        running = ending(front)
        lost = [make_request(request_id, [], group_id="g", num_choices=3, tenant="t", arrival_s=1.0) for request_id in ("g", "g#2")]
        front.loop.ask("count_lost", requests=[*lost, make_request("h", [], arrival_s=2.0)], num_tokens=[5, 6, 0])
        wait_for(lambda: front.stats().num_finished["error"] == 2, "both requests are in the books")
        stats = front.stats()
        assert (stats.generation_tokens, stats.num_running, stats.prefix_cache_query_tokens) == (11, 1, 3)
        assert front.history.recent(search="h~lost")[0]["status"] == "error"
        running.close()
        one.built.settle()
        assert front.stats().num_finished == {"completed": 0, "aborted": 1, "rejected": 0, "error": 2}


# ---- wherever what the engine says is cut off


class Played:
    """What an engine sent for some requests: its numbers and its updates, in their order."""

    def __init__(self, requests: list[AddRequest], abort: str) -> None:
        plan = make_plan()
        self.requests = requests
        self.frames: list[Any] = []
        recorder = ForwardingRecorder(recorder_info(plan), send=self.frames.append)
        info = ModelInfo(model_names=("fake",), max_model_len=plan.max_model_len, created_s=0, vocab_size=VOCAB_SIZE)
        runner = FakeRunner(plan.num_blocks, plan.block_size)
        loop = EngineLoop(EngineParts(plan=plan, info=info, scheduler=Scheduler(scheduler_limits(plan)), runner=runner, recorder=recorder))
        loop.start()
        loop.start_recording()
        loop.flush_metrics()
        self.is_over, self._num_open = threading.Event(), len(requests)
        with loop.gathering():
            for request in requests:
                loop.submit(request, self._post)
            loop.submit(AbortRequest(abort))
        assert self.is_over.wait(60)
        loop.close()

    def _post(self, updates: list[RequestUpdate]) -> None:
        self.frames.append(updates)
        self._num_open -= sum(update.finish_reason is not None for update in updates)
        if not self._num_open:
            self.is_over.set()


class Front:
    """Plays the front's side: what came, and what it adds up to once the rest is lost."""

    def __init__(self, requests: list[AddRequest]) -> None:
        self.requests, self.uncounted, self.totals = OpenRequests(), Uncounted(), defaultdict[Key, float](float)
        self.told: dict[str, str] = {}
        for request in requests:
            opened = self.requests.open(request, self._hear)
            assert opened is not None
            self.uncounted.open(opened)

    def take(self, frame: Any) -> None:
        if isinstance(frame, Numbers):
            self.count(frame)
        else:
            self.requests.deliver([to_wire(update) for update in frame])

    def count(self, numbers: Numbers) -> None:
        for key, amount in numbers.adds:
            self.totals[key] += amount
        self.uncounted.note_ended(numbers.ended)

    def lose(self) -> None:
        lost = ForwardedNumbers()
        LostBook(Ledger()).count(lost_ends(self.uncounted.take(), 0.0), 0, lost)
        self.count(lost.take() or Numbers())
        self.requests.fail_all(EngineClosedError("it was killed"))

    def sums(self, name: str, label: int) -> dict[str, float]:
        sums: Counter[str] = Counter()
        for key, amount in self.totals.items():
            if key[0] == name:
                sums[key[label]] += amount  # type: ignore[assignment]
        return {value: amount for value, amount in sums.items() if amount}

    def _hear(self, updates: list[RequestUpdate]) -> None:
        self.told |= {update.request_id: update.status for update in updates if update.finish_reason is not None}


@pytest.mark.parametrize("flush_interval_s", [0.0, 3600.0], ids=["numbers with each step", "numbers at the end only"])
def test_each_request_is_counted_once_wherever_the_engine_falls_silent(monkeypatch: pytest.MonkeyPatch, flush_interval_s: float) -> None:
    """With numbers for each step a request may be counted before its caller hears of it, else long after."""
    monkeypatch.setattr(recording, "FLUSH_INTERVAL_S", flush_interval_s)
    alone = [make_request(f"r{number}", [number + 1, 2, 3], max_tokens=2 + number, arrival_s=float(number)) for number in range(4)]
    choices = [
        make_request("g" if i == 0 else f"g#{i}", [7, 8], max_tokens=2 + 3 * i, group_id="g", choice_index=i, num_choices=3, arrival_s=9.0)
        for i in range(3)
    ]
    played = Played([*alone, *choices, make_request("long", [1] * 300, arrival_s=10.0)], abort="r3")
    whole = {"completed": 4.0, "aborted": 1.0, "rejected": 1.0}
    statuses, leads = [], []
    for cut in range(len(played.frames) + 1):
        front = Front(played.requests)
        for frame in played.frames[:cut]:
            front.take(frame)
        heard = {request_id: status for request_id, status in front.told.items() if not request_id.startswith("g")}
        leads.append(len(heard) - sum(front.sums("pagedcore_requests_total", 1).values()))
        front.lose()
        found = front.sums("pagedcore_requests_total", 1)
        statuses.append(found)
        assert sum(found.values()) == 6
        for status, count in Counter(heard.values()).items():
            assert found[status] >= count, "what a caller has heard is what is counted"
        assert front.uncounted.take() == []
        assert front.told.keys() == {request.request_id for request in played.requests}
    assert min(leads) < 0 if flush_interval_s == 0 else max(leads) > 0
    assert statuses[0] == {"error": 6.0}
    assert statuses[-1] == whole
    assert front.sums("pagedcore_rejected_requests_total", 1) == {"too_long": 1.0}


def opened(uncounted: Uncounted, request: AddRequest) -> OpenRequests:
    requests = OpenRequests()
    choice = requests.open(request, lambda _: None)
    assert choice is not None
    uncounted.open(choice)
    return requests


def test_an_id_that_is_used_again_before_its_first_end_is_counted_has_both_counted() -> None:
    uncounted = Uncounted()
    first = opened(uncounted, make_request("a", [1], arrival_s=1.0))
    first.deliver([to_wire(RequestUpdate("a", [5, 6], finish_reason="length", status="completed"))])
    opened(uncounted, make_request("a", [1], arrival_s=2.0))
    uncounted.note_ended([("a", True)])
    assert [choice.request.arrival_s for choice in uncounted.take()] == [2.0], "the numbers are of the first one"
    first = opened(uncounted, make_request("a", [1], arrival_s=1.0))
    first.deliver([to_wire(RequestUpdate("a", [5, 6], finish_reason="length", status="completed"))])
    opened(uncounted, make_request("a", [1], arrival_s=2.0))
    ledger, sink = Ledger(), ForwardedNumbers()
    LostBook(ledger).count(lost_ends(uncounted.take(), 3.0), 0, sink)
    assert ledger.count("pagedcore_requests_total", "completed", "length", "library", "", "") == 1
    assert ledger.count("pagedcore_requests_total", "error", "", "library", "", "") == 1
    assert ledger.count("pagedcore_generation_tokens_total", "") == 2


def test_a_request_that_is_counted_with_its_first_rejected_choice_is_not_counted_again_with_the_others() -> None:
    uncounted = Uncounted()
    for index in range(2):
        opened(uncounted, make_request(f"g#{index}" if index else "g", [1], group_id="g", num_choices=2, arrival_s=1.0))
    opened(uncounted, make_request("h", [1], arrival_s=1.0))
    uncounted.note_ended([("g#1", True)])
    assert [choice.request.request_id for choice in uncounted.take()] == ["h"]


def test_a_rejection_that_was_heard_and_not_counted_keeps_its_reason() -> None:
    uncounted = Uncounted()
    requests = opened(uncounted, make_request("a", [1]))
    requests.deliver([to_wire(failed_update("a", PromptTooLongError("too long", param="prompt"), "rejected"))])
    ledger = Ledger()
    LostBook(ledger).count(lost_ends(uncounted.take(), 0.0), 0, ForwardedNumbers())
    assert ledger.count("pagedcore_rejected_requests_total", "too_long") == 1
