"""The driver's own count of a device, by a module that stands in for NVML's."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pagedcore.device_meter import watch_device
from support.observed import Engine

UUID = "GPU-00000000-0000-0000-0000-000000000001"
NAME = "pagedcore_device_utilization_ratio{engine=0,model_name=m}"


class NVMLError(Exception):
    """What the fake driver raises."""


class FakeNvml(SimpleNamespace):
    """One device, busy for a share that tests set; it says when it was asked again."""

    def __init__(self) -> None:
        super().__init__(NVMLError=NVMLError)
        self.busy_percent: int | None = 42
        self.was_asked = threading.Event()

    def nvmlInit(self) -> None:  # noqa: N802
        """Ready."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != UUID:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        assert handle == UUID
        self.was_asked.set()
        if self.busy_percent is None:
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.busy_percent, memory=7)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def wait_for_two_questions(nvml: FakeNvml) -> None:
    """After the second one the answer of the first was told."""
    for _ in range(2):
        nvml.was_asked.clear()
        assert nvml.was_asked.wait(60.0)


def test_the_drivers_percent_becomes_a_ratio_and_follows_it(nvml: FakeNvml) -> None:
    engine = Engine()
    thread = watch_device(engine.recorder, UUID, interval_s=0.001)
    assert thread is not None
    for percent in (42, 90):
        nvml.busy_percent = percent
        wait_for_two_questions(nvml)
        assert engine.samples()[NAME] == percent / 100
    engine.recorder.close()
    thread.join(60.0)
    assert not thread.is_alive()
    assert engine.samples()[NAME] == 0


def test_a_closed_recorder_takes_no_more_and_says_so() -> None:
    engine = Engine()
    assert engine.recorder.set_device_utilization(0.5) is True
    engine.recorder.close()
    assert engine.recorder.set_device_utilization(0.9) is False
    assert engine.recorder._ledger.gauge("pagedcore_device_utilization_ratio") == 0
    assert engine.samples()[NAME] == 0


def test_a_forgotten_engine_is_asked_for_no_more(nvml: FakeNvml) -> None:
    engine = Engine()
    thread = watch_device(engine.recorder, UUID, interval_s=0.001)
    del engine
    assert thread is not None
    thread.join(60.0)
    assert not thread.is_alive()


def test_a_driver_that_stops_answering_ends_the_questions_and_is_said(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    thread = watch_device(engine.recorder, UUID, interval_s=0.001)
    assert thread is not None
    nvml.busy_percent = None
    thread.join(60.0)
    assert not thread.is_alive()
    assert caplog.messages == ["pagedcore_device_utilization_ratio stays at its last value: Not Supported."]


@pytest.mark.parametrize("uuid", [None, "GPU-of-another-machine"])
def test_without_the_device_there_is_no_series_and_no_thread(nvml: FakeNvml, uuid: str | None) -> None:
    engine = Engine()
    assert watch_device(engine.recorder, uuid) is None
    assert NAME not in engine.samples()


def test_a_device_that_counts_nothing_has_no_series(nvml: FakeNvml) -> None:
    nvml.busy_percent = None
    engine = Engine()
    assert watch_device(engine.recorder, UUID) is None
    assert NAME not in engine.samples()


def test_without_the_package_there_is_no_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    engine = Engine()
    assert watch_device(engine.recorder, UUID) is None
    assert NAME not in engine.samples()


def test_the_package_is_not_asked_for_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert watch_device(Engine().recorder, None) is None
    assert "pynvml" not in sys.modules
