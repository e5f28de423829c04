"""The operator's console over real processes: LitServe with two workers, and BentoML."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from support.repository import ROOT
from support.served import Served, free_port, serve, wait_until

pytestmark = pytest.mark.serve


def ask(served: Served, max_tokens: int, request_id: str) -> httpx.Response:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens}
    return httpx.post(served.url + "/v1/chat/completions", json=body, headers={"X-Request-Id": request_id}, timeout=60)


def worker_pids(served: Served) -> list[int]:
    return [pid for pid, command in served.pids().items() if "spawn_main" in command]


def engines(served: Served) -> list[str]:
    response = served.get("/v1/stats")
    return [one["engine"] for one in response.json()["data"]] if response.status_code == 200 else []


def test_two_workers_answer_and_a_hung_one_is_named_in_time(tmp_path: Path) -> None:
    port = free_port()
    script = str(ROOT / "tests" / "support" / "fake_litserve_app.py")
    with serve([script, str(port), "2", "2", "good"], tmp_path / "server.log", port=port) as served:
        wait_until(lambda: engines(served) == ["0", "1"], 60, "two warm workers")
        assert ask(served, 4, "r").status_code == 200
        assert served.get("/v1/requests").json()["object"] == "list"
        assert served.get("/v1/cache/explain/nobody").json()["error"]["code"] == "request_not_found"
        assert served.get("/ui").status_code == served.get("/ui/page.js").status_code == 200
        with httpx.stream("GET", served.url + "/ui/feed", timeout=60) as response:
            event = json.loads(next(response.iter_lines()).removeprefix("data: "))
        assert [(one["engine"], one["blocks"]["num_blocks"]) for one in event["engines"]] == [("0", 16), ("1", 16)]
        stopped = worker_pids(served)[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            response = served.get("/v1/stats")
            assert (response.status_code, response.json()["error"]["code"]) == (504, "no_answer")
        finally:
            os.kill(stopped, signal.SIGCONT)
        wait_until(lambda: engines(served) == ["0", "1"], 60, "both answer again")


def test_an_open_page_does_not_keep_a_server_from_stopping(tmp_path: Path) -> None:
    port = free_port()
    script = str(ROOT / "tests" / "support" / "fake_litserve_app.py")
    with (
        serve([script, str(port), "1", "1", "good", "3600"], tmp_path / "server.log", port=port) as served,
        httpx.stream("GET", served.url + "/ui/feed", timeout=60) as response,
    ):
        next(response.iter_lines())
        assert served.terminate() == 0, "within a minute, not within the hour that answers may take"
