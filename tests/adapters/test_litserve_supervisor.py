"""The watch over a server's processes: who ended is told, and a worker is started again, later each time it cannot."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from pagedcore import ConfigError, EngineConfig
from pagedcore.openai import ServerSettings
from pagedcore_adapters import _litserve_server
from pagedcore_adapters._litserve_messages import WorkerLost
from pagedcore_adapters._litserve_placement import Placement
from pagedcore_adapters._litserve_server import PagedServer, ServerOptions
from pagedcore_adapters._litserve_supervisor import Supervisor
from pagedcore_adapters._litserve_worker_api import WorkerAPI
from pagedcore_adapters._prometheus_dir import VARIABLE


def start(target: Callable[..., object], *arguments: object) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def ended() -> BaseProcess:
    process = start(int)
    process.join()
    return process


class Host:
    """A server that remembers what it is told, and starts processes that stay."""

    def __init__(self, *pauses_s: float | None) -> None:
        self.pauses_s = list(pauses_s)
        self.deaths: list[tuple[int, int | None]] = []
        self.api_deaths: list[int] = []
        self.started: list[BaseProcess] = []

    def on_worker_death(self, worker_id: int, process: BaseProcess) -> float | None:
        self.deaths.append((worker_id, process.exitcode))
        return self.pauses_s.pop(0)

    def restart_worker(self, worker_id: int) -> BaseProcess:
        self.started.append(start(signal.pause))
        return self.started[-1]

    def on_api_server_death(self, queue_id: int) -> None:
        self.api_deaths.append(queue_id)

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.join()


def test_a_worker_that_ends_is_told_once_and_started_again_in_its_place() -> None:
    host, living = Host(0.0, 0.0), start(signal.pause)
    workers = [living, ended()]
    supervisor = Supervisor(workers, {}, host)
    supervisor.step()
    assert host.deaths == [(1, 0)]
    assert workers == [living, host.started[0]]
    supervisor.step()
    assert (len(host.deaths), len(host.started)) == (1, 1)
    host.started[0].kill()
    host.started[0].join()
    supervisor.step()
    assert host.deaths == [(1, 0), (1, -signal.SIGKILL)]
    assert workers[1] is host.started[1]
    living.kill()
    host.close()


def test_a_pause_is_kept_and_holds_nobody_up() -> None:
    host = Host(3600.0, None)
    supervisor = Supervisor([ended(), ended()], {7: ended()}, host)
    supervisor.step()
    supervisor.step()
    assert sorted(host.deaths) == [(0, 0), (1, 0)]
    assert host.api_deaths == [7]
    assert host.started == []


def test_a_stopped_watch_starts_nothing() -> None:
    host = Host(0.0)
    supervisor = Supervisor([ended()], {}, host)
    supervisor.stop()
    supervisor.step()
    assert host.started == []
    supervisor.run()


# ---- what a server does when it is told


class Process:
    pid, exitcode = 123, -9


def make_server(monkeypatch: pytest.MonkeyPatch, *ready: int) -> tuple[PagedServer, list[tuple[int, Any]], list[int]]:
    buried: list[int] = []
    monkeypatch.setattr(_litserve_server, "forget_process", lambda pid: buried.append(pid) or 3)
    monkeypatch.setenv(VARIABLE, "restored after the test")
    monkeypatch.delenv(VARIABLE)
    server = PagedServer(WorkerAPI(EngineConfig()), ServerSettings(), Placement("cpu", 1), ServerOptions(workers_per_device=2))
    server.lit_api.num_api_servers, server.lit_api.ready = 2, dict.fromkeys(ready, time.monotonic())
    server._shutdown_event = threading.Event()
    told: list[tuple[int, Any]] = []
    server.send_to_api_server = lambda queue_id, news: told.append((queue_id, news))  # type: ignore[method-assign]
    return server, told, buried


def test_every_api_server_hears_who_ended_and_why_and_its_gauges_are_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, told, buried = make_server(monkeypatch, 0, 1)
    assert server.on_worker_death(1, Process()) == 0.5  # type: ignore[arg-type]
    assert told == [(queue_id, WorkerLost(1, "exit code -9")) for queue_id in (0, 1)]
    assert buried == [123]
    assert "Worker process 1 has ended (exit code -9) with 3 requests open" in caplog.text
    assert list(server.lit_api.ready) == [0]


def test_a_worker_that_ends_with_the_server_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    server, told, _ = make_server(monkeypatch, 0, 1)
    server._num_signals = 1
    assert server.on_worker_death(1, Process()) is None  # type: ignore[arg-type]
    assert told == []


def test_a_worker_that_cannot_start_again_is_tried_for_ever_while_another_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    server, told, _ = make_server(monkeypatch, 0)
    for pause_s in (0.5, 1.0, 2.0, 4.0, 8.0):
        server.lit_api.failures[1] = ConfigError("there is no memory left.")
        assert server.on_worker_death(1, Process()) == pause_s  # type: ignore[arg-type]
    assert told[-1] == (1, WorkerLost(1, "there is no memory left."))
    assert not server._shutdown_event.is_set()


def test_a_worker_that_was_ready_for_long_starts_again_as_if_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    server, _, _ = make_server(monkeypatch)
    for _ in range(10):
        server.lit_api.ready[1] = time.monotonic() - 1000.0
        assert server.on_worker_death(1, Process()) == 0.5  # type: ignore[arg-type]
    server.lit_api.ready[1] = time.monotonic() + 1000.0
    assert server.on_worker_death(1, Process()) == 1.0, "it ended as soon as it was ready"  # type: ignore[arg-type]


def test_a_server_whose_last_worker_cannot_start_again_ends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    server, _, _ = make_server(monkeypatch)
    pauses = []
    for _ in range(4):
        server.lit_api.failures[1] = ConfigError("there is no memory left.")
        pauses.append(server.on_worker_death(1, Process()))  # type: ignore[arg-type]
    assert pauses == [0.5, 1.0, 2.0, None]
    assert server._shutdown_event.is_set()
    assert server._ended_by_itself == ["Worker process 1 ended 4 times soon after its start: there is no memory left."]
