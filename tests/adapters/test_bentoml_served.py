"""What `bentoml serve` makes of a service: metrics of one and two workers, dependencies in their own process, and its end."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.bentoml_served import client_of
from support.fake_engine import ANSWER
from support.served import Served, free_port, serve, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.slow]

TOKENS_OF_A_SECOND = 1000
"""Of the fake loop, whose steps take half a millisecond and more."""


def serve_app(name: str, folder: Path, *flags: str, **variables: str) -> AbstractContextManager[Served]:
    port = free_port()
    arguments = ["-m", "bentoml", "serve", f"support.bentoml_app:{name}", "--host", "127.0.0.1", "--port", str(port), *flags]
    env = {"BENTOML_HOME": str(folder / "bentoml"), "BENTOML_DO_NOT_TRACK": "True", **variables}
    return serve(arguments, folder / f"{name}.log", port=port, ready_path="/readyz", env=env)


def samples(text: str) -> Counter[tuple[str, tuple[tuple[str, str], ...]]]:
    """How often each series of ours is there."""
    families = [family for family in text_string_to_metric_families(text) if family.name.startswith("pagedcore_")]
    return Counter((sample.name, tuple(sorted(sample.labels.items()))) for family in families for sample in family.samples)


def total(text: str, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(text)
    found = [sample for family in families for sample in family.samples if sample.name == name and labels.items() <= sample.labels.items()]
    return sum(sample.value for sample in found)


# ---- metrics

FIRST_IMPORTS = ["prometheus_client", "pagedcore_adapters.bentoml_service"]


def complete(url: str, start: int) -> None:
    body = {"model": "fake", "prompt": [start, *range(20)], "max_tokens": 5}
    assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code == 200


@pytest.mark.parametrize("first_import", FIRST_IMPORTS)
def test_each_number_is_there_once_whatever_is_imported_first(tmp_path: Path, first_import: str) -> None:
    with serve_app("counting", tmp_path, FIRST_IMPORT=first_import) as server:
        for start in range(7):
            complete(server.url, start)
        wait_until(lambda: total(server.get("/metrics").text, "pagedcore_requests_total") == 7, 60, "seven requests in /metrics")
        text = server.get("/metrics").text
    assert max(samples(text).values()) == 1
    assert {dict(labels)["engine"] for _, labels in samples(text)} == {"0"}
    assert total(text, "pagedcore_requests_total", adapter="bentoml", status="completed", finish_reason="length") == 7
    assert total(text, "pagedcore_prompt_tokens_total") == 7 * 21
    assert total(text, "pagedcore_generation_tokens_total") == 7 * 5
    assert total(text, "pagedcore_time_to_first_token_seconds_count") == 7


def test_of_two_workers_each_has_its_series_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    with serve_app("counting", tmp_path, WORKERS="2") as server:
        num_sent = 0

        def have_both_answered() -> bool:
            nonlocal num_sent
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda start: complete(server.url, start), range(8)))
            num_sent += 8
            text = server.get("/metrics").text
            return all(total(text, "pagedcore_requests_total", engine=engine, status="completed") for engine in ("0", "1"))

        wait_until(have_both_answered, 60, "both workers answered something")
        wait_until(lambda: total(server.get("/metrics").text, "pagedcore_requests_total") == num_sent, 60, "all requests in /metrics")
        scrapes = [server.get("/metrics").text for _ in range(6)]
    for text in scrapes:  # whichever worker is asked
        assert max(samples(text).values()) == 1
        assert {dict(labels)["engine"] for _, labels in samples(text)} == {"0", "1"}
        assert total(text, "pagedcore_requests_total", adapter="bentoml", status="completed") == num_sent
        assert total(text, "pagedcore_generation_tokens_total") == num_sent * 5


# ---- dependencies


@pytest.mark.parametrize("flags", [(), ("--development",)], ids=["in a process of its own", "in the same process"])
def test_a_service_that_depends_on_ours_gets_replies_and_streams(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with serve_app("outer", tmp_path, *flags) as server, client_of(server.url) as client:
        pid, answer = client.shout(text="hi").split(" ", 1)
        assert answer == ANSWER[:10].upper()
        assert "".join(client.shout_on(text="hi")) == ANSWER[:10].upper()
        others = [line for line in server.pids().values() if "--service-name talking" in line]
        assert len(others) == (0 if flags else 1)
        assert int(pid) in server.pids()


# ---- the end


class Reader(threading.Thread):
    """Reads one stream of `/generate_stream`."""

    def __init__(self, url: str, num_tokens: int) -> None:
        super().__init__()
        self.url, self.num_tokens = url, num_tokens
        self.has_begun = threading.Event()
        self.text = ""
        self.failure: Exception | None = None
        self.start()
        assert self.has_begun.wait(60.0)

    def run(self) -> None:
        body: dict[str, Any] = {"prompt": "hi", "max_tokens": self.num_tokens}
        try:
            with httpx.stream("POST", self.url + "/generate_stream", json=body, timeout=60) as reply:
                for piece in reply.iter_text():
                    self.text += piece
                    self.has_begun.set()
        except httpx.HTTPError as error:
            self.failure = error


def test_at_sigterm_what_runs_comes_to_its_end(tmp_path: Path) -> None:
    with serve_app("talking", tmp_path) as server:
        reader = Reader(server.url, 3 * TOKENS_OF_A_SECOND)
        assert server.terminate() == 0
        reader.join(60)
        assert reader.failure is None
        assert len(reader.text) == 3 * TOKENS_OF_A_SECOND
        wait_until(lambda: not server.pids(), 60, "no process left")


def test_what_does_not_end_within_the_time_to_drain_is_aborted_and_its_stream_breaks(tmp_path: Path) -> None:
    with serve_app("talking", tmp_path, DRAIN_TIMEOUT_S="0.5") as server:
        reader = Reader(server.url, 10**9)
        assert server.terminate() == 0
        reader.join(60)
        assert isinstance(reader.failure, httpx.RemoteProtocolError)
        wait_until(lambda: not server.pids(), 60, "no process left")
