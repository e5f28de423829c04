"""What came to an engine is counted before the engine thread sees it, and what ended before its caller hears of it."""

from __future__ import annotations

import threading

import pytest
from prometheus_client import CollectorRegistry

from pagedcore.client import ModelInfo
from pagedcore.core.scheduler import Scheduler
from pagedcore.engine_build import recorder_info, scheduler_limits
from pagedcore.engine_loop import EngineLoop, EngineParts
from pagedcore.errors import EngineClosedError
from pagedcore.messages import RequestUpdate
from pagedcore.observe import recorder as recording
from pagedcore.observe.recorder import Recorder
from support.core_builders import make_request
from support.engine_builder import GatedRunner, make_plan
from support.fake_runner import VOCAB_SIZE, FakeRunner


class Counted:
    """An engine loop with a registry that is read without a flush, as another process reads its files."""

    def __init__(self, **options: object) -> None:
        self.registry, plan = CollectorRegistry(), make_plan(**options)  # type: ignore[arg-type]
        self.runner = GatedRunner(FakeRunner(plan.num_blocks, plan.block_size))
        self.runner.gate.set()
        info = ModelInfo(model_names=("fake",), max_model_len=plan.max_model_len, created_s=0, vocab_size=VOCAB_SIZE)
        recorder = Recorder(recorder_info(plan), registry=self.registry)
        scheduler = Scheduler(scheduler_limits(plan))
        self.loop = EngineLoop(EngineParts(plan=plan, info=info, scheduler=scheduler, runner=self.runner, recorder=recorder))
        self.loop.start()
        self.loop.start_recording()

    def num(self, name: str, **labels: str) -> float:
        samples = [sample for family in self.registry.collect() for sample in family.samples if sample.name == f"pagedcore_{name}"]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def ignore(_: list[RequestUpdate]) -> None:
    """Nobody listens."""


def test_a_request_is_received_as_soon_as_it_is_submitted_and_its_choices_are_one() -> None:
    counted, held = Counted(), threading.Event()
    counted.loop.call(held.wait)
    counted.loop.submit(make_request("a", [1], tenant="t", adapter="litserve", request_class="c"), ignore)
    for index in range(2):
        counted.loop.submit(make_request("b" if not index else "b#1", [1], group_id="b", choice_index=index, num_choices=2), ignore)
    assert counted.num("received_requests_total", adapter="litserve", tenant="t", **{"class": "c"}) == 1
    assert counted.num("received_requests_total", adapter="library", tenant="") == 1
    assert counted.num("requests_total") == 0
    held.set()
    counted.loop.close()
    assert counted.num("received_requests_total") == counted.num("requests_total") == 2
    with pytest.raises(EngineClosedError):
        counted.loop.submit(make_request("late", [1]), ignore)
    assert counted.num("received_requests_total") == 2


def test_who_hears_of_an_end_finds_it_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """While others run the other numbers wait for the next export."""
    monkeypatch.setattr(recording, "FLUSH_INTERVAL_S", 3600.0)
    counted, is_over = Counted(max_model_len=20_100, num_blocks=4096), threading.Event()
    found: list[float] = []

    def hear(updates: list[RequestUpdate]) -> None:
        if any(update.finish_reason is not None for update in updates):
            found.append(counted.num("requests_total", status="completed"))
            is_over.set()

    counted.loop.submit(make_request("runs on", [1, 2], max_tokens=20_000), ignore)
    counted.loop.submit(make_request("ends", [1, 2, 3], max_tokens=3), hear)
    assert is_over.wait(60)
    assert found == [1]
    assert counted.num("generation_tokens_total") == 0
    counted.loop.close()
    assert counted.num("requests_total") == counted.num("received_requests_total") == 2


def test_what_only_warms_the_cache_up_is_not_received() -> None:
    counted = Counted()
    counted.loop.pause_recording()
    counted.loop.submit(make_request("warms", [1], max_tokens=1), ignore)
    counted.loop.start_recording()
    assert counted.num("received_requests_total") == 0
    counted.loop.close()


def test_what_an_engine_before_this_one_took_along_is_received_and_ended_here() -> None:
    from pagedcore.remote.lost_requests import lost_ends
    from pagedcore.remote.open_requests import OpenRequest

    counted = Counted()
    lost = [make_request(name, [], group_id="g", num_choices=3) for name in ("g#1", "g#2")]
    counted.loop.count_lost(lost_ends([OpenRequest(request, ignore) for request in [*lost, make_request("h", [])]], 1.0))
    counted.loop.call(lambda: None).result(60)
    counted.loop.close()
    assert counted.num("received_requests_total") == counted.num("requests_total", status="error") == 2


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "not recording"])
def test_an_engine_that_does_not_count_their_ends_does_not_receive_them(is_closed: bool) -> None:
    from pagedcore.remote.lost_requests import lost_ends
    from pagedcore.remote.open_requests import OpenRequest

    counted, ends = Counted(), lost_ends([OpenRequest(make_request("h", []), ignore)], 1.0)
    if is_closed:
        counted.loop.close()
        with pytest.raises(EngineClosedError):
            counted.loop.count_lost(ends)
    else:
        counted.loop.pause_recording()
        counted.loop.count_lost(ends)
        counted.loop.close()
    assert counted.num("received_requests_total") == counted.num("requests_total") == 0
