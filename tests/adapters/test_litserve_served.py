"""LitServe really served, with fake engines in the workers: what its processes do to each other."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.fake_engine import ANSWER
from support.fake_litserve import SCRIPT, ask, is_ready, serve_fake, stream_lines, worker_pids
from support.served import Served, free_port, serve, wait_until

pytestmark = pytest.mark.serve


def http_pid(served: Served) -> int:
    """The main process, its manager and the API server have one command line, and were started in this order."""
    commands = served.pids()
    forked = [pid for pid, command in commands.items() if command == commands[served.process.pid]]
    assert len(forked) == 3
    return max(forked)


def test_two_workers_and_two_api_servers_answer_sixteen_at_once_and_sigterm_leaves_nothing(tmp_path: Path) -> None:
    with serve_fake(tmp_path, workers=2, api_servers=2) as served:
        wait_until(lambda: len(worker_pids(served)) == 2, 60, "two workers")
        with ThreadPoolExecutor(16) as pool:
            replies = list(pool.map(lambda n: ask(served, n), range(20, 36)))
        assert [reply.json()["choices"][0]["message"]["content"] for reply in replies] == [(ANSWER * 2)[:n] for n in range(20, 36)]
        assert served.get("/litserve/health").status_code == 200
        assert served.terminate() == 0
        wait_until(lambda: not served.pids(), 60, "no process left")


def test_sigterm_lets_an_open_answer_end(tmp_path: Path) -> None:
    with serve_fake(tmp_path) as served, ThreadPoolExecutor(1) as pool:
        lines = stream_lines(served, 1000)
        next(lines)
        ended = pool.submit(served.terminate)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert ended.result(60) == 0
        wait_until(lambda: not served.pids(), 60, "no process left")


def signal_all(served: Served, number: signal.Signals) -> None:
    """What a terminal or a supervisor does: every process of the server gets the signal."""
    for pid in served.pids():
        os.kill(pid, number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_every_process_lets_an_open_answer_end_and_prints_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with serve_fake(tmp_path) as served:
        lines = stream_lines(served, 2000)
        next(lines)
        signal_all(served, number)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert served.process.wait(60) == 0
        wait_until(lambda: not served.pids(), 60, "no process left")
        assert "Traceback" not in served.tail()


def test_a_second_ctrl_c_does_not_wait_for_an_endless_answer(tmp_path: Path) -> None:
    with serve_fake(tmp_path) as served:
        lines = stream_lines(served, 10**9)
        next(lines)
        signal_all(served, signal.SIGINT)
        wait_until(lambda: not is_ready(served), 60, "a server that takes no more requests")
        signal_all(served, signal.SIGINT)
        assert served.process.wait(60) == 0
        wait_until(lambda: not served.pids(), 60, "no process left")
        assert "Traceback" not in served.tail()


def test_a_killed_http_process_ends_the_server(tmp_path: Path) -> None:
    with serve_fake(tmp_path) as served:
        os.kill(http_pid(served), signal.SIGKILL)
        assert served.process.wait(60) == 1
        wait_until(lambda: not served.pids(), 60, "no process left")
        assert "EngineError: HTTP process 0 has ended by itself" in served.tail()


def test_a_killed_main_process_leaves_nothing(tmp_path: Path) -> None:
    with serve_fake(tmp_path) as served:
        served.process.kill()
        wait_until(lambda: not served.pids(), 60, "no process left")


def test_a_port_in_use_is_an_error_before_anything_is_loaded(tmp_path: Path) -> None:
    with serve_fake(tmp_path) as served:
        port = served.url.rpartition(":")[2]
        with serve([SCRIPT, port, "1", "1", "slow"], tmp_path / "second.log", port=int(port), ready_path=None) as second:
            assert second.process.wait(60) == 1
        assert f"ConfigError: port {port} of 127.0.0.1 cannot be used: Address already in use" in second.tail()
        assert "loading" not in second.tail()


def test_a_worker_that_is_killed_while_it_loads_ends_the_server(tmp_path: Path) -> None:
    port = free_port()
    with serve([SCRIPT, str(port), "1", "1", "slow"], tmp_path / "server.log", port=port, ready_path=None) as served:
        wait_until(lambda: "loading" in served.tail(), 60, "a worker that loads")
        os.kill(worker_pids(served)[0], signal.SIGKILL)
        assert served.process.wait(60) == 1
        wait_until(lambda: not served.pids(), 60, "no process left")
        assert "EngineError: Worker process 0 ended with exit code -9 before it was ready" in served.tail()


def test_an_engine_that_cannot_start_ends_the_server_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the server ended with 1"), serve_fake(tmp_path, kind="broken"):
        pass
    log = (tmp_path / "server.log").read_text(encoding="utf-8")
    assert log.splitlines()[-1].endswith("ModelSourceError: there is no such model")
    assert log.count("Traceback") == 1, "of the main process, which raises it"


def test_sigterm_while_a_worker_still_loads_leaves_nothing(tmp_path: Path) -> None:
    port = free_port()
    with serve([SCRIPT, str(port), "1", "1", "slow"], tmp_path / "server.log", port=port, ready_path=None) as served:
        wait_until(lambda: "loading" in served.tail(), 60, "a worker that loads")
        assert served.terminate() == 0
        wait_until(lambda: not served.pids(), 60, "no process left")
