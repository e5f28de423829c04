"""Graphs are recorded beside other engines: what is given to the device, in which order, and who waits meanwhile. CUDA is a fake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from pagedcore.runtime.graph_recorder import GraphRecorder, device_lock, give_back_memory, recording_stream

DEVICE = torch.device("cuda", 7)


class FakeCuda:
    """Notes the calls, and whether the device's lock is held at each."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stream_name = "current"

    def note(self, call: str) -> None:
        self.calls.append(f"{call}, {'alone' if device_lock(DEVICE).locked() else 'beside others'}")

    def step(self) -> int:
        self.note(f"step on the {self.stream_name} stream")
        return len(self.calls)

    def wait_stream(self, other: str) -> None:
        self.note(f"wait for the {other} stream")

    def synchronize(self) -> None:
        self.note("synchronize")

    def empty_cache(self) -> None:
        self.note("empty the cache")

    @contextmanager
    def stream(self, stream: FakeCuda) -> Iterator[None]:
        assert stream is self
        self.stream_name = "side"
        try:
            yield
        finally:
            self.stream_name = "current"

    def capture_begin(self, *, pool: str, capture_error_mode: str) -> None:
        assert (pool, self.stream_name) == ("pool", "side")
        self.note(f"record {capture_error_mode}")

    def capture_end(self) -> None:
        self.note("recorded")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: fake)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: fake.synchronize())
    monkeypatch.setattr(torch.cuda, "empty_cache", fake.empty_cache)
    recording_stream.cache_clear()
    yield fake
    recording_stream.cache_clear()


def test_the_side_stream_waits_for_earlier_work_and_other_engines_wait_for_it(cuda: FakeCuda) -> None:
    assert GraphRecorder(DEVICE).record(cuda.step) == (cuda, 6)
    assert cuda.calls == [
        "step on the current stream, beside others",
        "wait for the current stream, alone",
        "step on the side stream, alone",
        "synchronize, alone",
        "record thread_local, alone",
        "step on the side stream, alone",
        "recorded, alone",
    ]
    assert not device_lock(DEVICE).locked()


def test_the_side_stream_is_tried_once_a_recorder(cuda: FakeCuda) -> None:
    recorder = GraphRecorder(DEVICE)
    recorder.record(cuda.step)
    first = cuda.calls[:]
    recorder.record(cuda.step)
    assert cuda.calls[len(first) :] == [call for index, call in enumerate(first) if index != 2]


def test_the_model_is_short_before_and_whole_while_a_graph_is_recorded(cuda: FakeCuda) -> None:
    is_short, runs = [False], []

    @contextmanager
    def shortened() -> Iterator[None]:
        is_short[0] = True
        yield
        is_short[0] = False

    recorder = GraphRecorder(DEVICE, shortened)
    for _ in range(2):
        recorder.record(lambda: runs.append((cuda.stream_name, is_short[0])))
    before, first, recorded = ("current", True), ("side", True), ("side", False)
    assert runs == [before, first, recorded, before, recorded]


def test_a_step_that_fails_leaves_the_device_to_others(cuda: FakeCuda) -> None:
    def fail_on_the_side() -> None:
        if cuda.stream_name == "side":
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        GraphRecorder(DEVICE).record(fail_on_the_side)
    assert GraphRecorder(DEVICE).record(cuda.step)[0] is cuda
    assert not device_lock(DEVICE).locked()


def test_a_recording_that_fails_is_ended(cuda: FakeCuda) -> None:
    runs = iter([None, None])

    def fail_while_recording() -> None:
        if next(runs, "third") == "third":
            raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        GraphRecorder(DEVICE).record(fail_while_recording)
    assert cuda.calls[-1] == "recorded, alone"


def test_memory_is_given_back_unless_a_graph_is_recorded(cuda: FakeCuda) -> None:
    GraphRecorder(DEVICE).record(lambda: give_back_memory(DEVICE))
    assert cuda.calls == [
        "synchronize, beside others",
        "empty the cache, beside others",
        "wait for the current stream, alone",
        "synchronize, alone",
        "record thread_local, alone",
        "recorded, alone",
    ]


def test_devices_have_locks_of_their_own() -> None:
    assert device_lock(torch.device("cuda", 7)) is device_lock(DEVICE)
    with device_lock(torch.device("cuda", 6)):
        assert not device_lock(DEVICE).locked()
