"""A worker of `bentoml serve` that is killed: its requests are counted by the one that comes in its stead."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.served import Served, free_port, serve, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow]

WORKER = "_bentoml_impl.worker.service"


def num(server: Served, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(server.get("/metrics").text)
    found = [sample for family in families for sample in family.samples if sample.name == f"pagedcore_{name}"]
    return sum(sample.value for sample in found if labels.items() <= sample.labels.items())


def complete(server: Served, start: int) -> httpx.Response:
    body = {"model": "fake", "prompt": [start, *range(20)], "max_tokens": 5}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=120)


def test_what_a_killed_worker_had_open_is_counted_once_by_the_one_that_comes_after_it(tmp_path: Path) -> None:
    port = free_port()
    arguments = ["-m", "bentoml", "serve", "support.bentoml_hanging_app:hanging", "--host", "127.0.0.1", "--port", str(port)]
    env = {"BENTOML_HOME": str(tmp_path / "bentoml"), "BENTOML_DO_NOT_TRACK": "True", "HANGS": str(tmp_path / "mark")}
    with serve(arguments, tmp_path / "log", port=port, ready_path="/readyz", env=env) as server, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(complete, server, start) for start in range(3)]
        wait_until(lambda: num(server, "received_requests_total") == 3, 60, "each at the engine, of which it has not told anybody yet")
        assert num(server, "requests_total") == 0
        (worker,) = [pid for pid, command in server.pids().items() if WORKER in command]
        os.kill(worker, signal.SIGKILL)
        for reply in waiting:
            with pytest.raises(httpx.TransportError):  # its end of the connection is gone with it
                reply.result(120)
        wait_until(lambda: server.is_ready("/readyz"), 120, "another worker is there")
        assert (num(server, "received_requests_total"), num(server, "requests_total")) == (3, 3)
        assert num(server, "requests_total", status="error", adapter="bentoml") == 3
        assert num(server, "open_requests") == 0, "no gauge of a dead process"
        assert "took 3 requests with it" in server.tail()
        assert complete(server, 1).status_code == 200
        wait_until(lambda: num(server, "requests_total", status="completed") == 1, 60, "and it counts on")
        assert (num(server, "received_requests_total"), num(server, "requests_total", status="error")) == (4, 3)
