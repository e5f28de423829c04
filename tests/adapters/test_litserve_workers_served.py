"""LitServe really served by several workers and HTTP processes: who gets what, who dies, who is told, and who comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.fake_litserve import ENDLESS, ask, body, is_ready, messages, serve_fake, stream_lines, worker_pid
from support.served import Served, post_and_leave, wait_until

pytestmark = pytest.mark.serve

LONG = "A long and winding instruction that many a conversation begins with. "


def workers_of(served: Served, kind: str) -> dict[str, int]:
    """Request id -> the worker that got its last message of this kind."""
    return {request_id: worker_id for worker_id, request_id in messages(served, kind)}


def lines_of_two(served: Served, max_tokens: int) -> tuple[Iterator[str], Iterator[str]]:
    """Two open streams, called s0 and s1, the first at worker 0 and the second at worker 1."""
    opened: dict[int, Iterator[str]] = {}
    for number in range(20):
        lines = stream_lines(served, max_tokens, f"try-{number}", content=f"{number} {LONG}")
        next(lines)
        worker_id = workers_of(served, "AddRequest")[f"try-{number}"]
        if worker_id in opened:
            lines.close()  # type: ignore[attr-defined]
        opened.setdefault(worker_id, lines)
        if len(opened) == 2:
            return opened[0], opened[1]
    raise AssertionError("twenty prompts went to one worker")


def errors_in(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("data:") and '"error"' in line]


def refusal(reply: httpx.Response) -> tuple[int, str, bool]:
    return reply.status_code, reply.json()["error"]["code"], int(reply.headers["Retry-After"]) >= 1


def refused(served: Served, path: str) -> httpx.Response:
    """The refusal of the HTTP process that a new connection reaches: each hears of a worker's death by itself, one before the other."""
    replies: list[httpx.Response] = []

    def is_refused() -> bool:
        replies.append(served.get(path))
        return replies[-1].status_code == 503

    wait_until(is_refused, 60, f"{path} says that a worker is missing")
    return replies[-1]


def test_a_killed_worker_fails_its_own_requests_only_and_comes_back(tmp_path: Path) -> None:
    with serve_fake(tmp_path, workers=2, api_servers=2) as served:
        lost, kept = lines_of_two(served, 15_000)
        os.kill(worker_pid(served, 0), signal.SIGKILL)
        (error,) = errors_in(list(lost))
        assert "Worker process 0 has ended (exit code -9) and took this request with it; send it again." in error
        assert '"code":"engine_closed"' in error
        unready = refused(served, "/ready")
        assert refusal(unready) == (503, "engine_closed", True)
        assert "1 of 2 worker processes are ready: 0 starts again after it ended (exit code -9)" in unready.text
        assert served.get("/health").status_code == 200
        assert ask(served, 3).status_code == 200
        wait_until(lambda: is_ready(served), 60, "worker 0 is back")
        last = [line for line in kept if line]
        assert last[-1] == "data: [DONE]"
        assert errors_in(last) == []
        first, second = lines_of_two(served, 5)
        assert [line for line in (*first, *second) if "error" in line] == []
        assert served.terminate() == 0
        wait_until(lambda: not served.pids(), 60, "no process left")


def test_a_client_that_leaves_is_aborted_in_the_worker_that_has_it_and_only_there(tmp_path: Path) -> None:
    with serve_fake(tmp_path, workers=2, api_servers=2) as served:
        left, stayed = lines_of_two(served, ENDLESS)
        aborted_before = messages(served, "AbortRequest")
        left.close()  # type: ignore[attr-defined]
        wait_until(lambda: messages(served, "AbortRequest") != aborted_before, 60, "an abort")
        ((worker_id, name),) = messages(served, "AbortRequest")[len(aborted_before) :]
        assert (worker_id, workers_of(served, "AddRequest")[name]) == (0, 0)
        next(stayed)
        url, is_there = served.url + "/v1/chat/completions", lambda: "whole" in workers_of(served, "AddRequest")
        post_and_leave(url, body(max_tokens=ENDLESS), is_there, headers={"X-Request-Id": "whole"})
        wait_until(lambda: "whole" in workers_of(served, "AbortRequest"), 60, "an abort without a stream")
        assert workers_of(served, "AbortRequest").items() <= workers_of(served, "AddRequest").items()
        stayed.close()  # type: ignore[attr-defined]


def test_the_only_worker_killed_is_503_with_retry_after_everywhere_until_it_is_back(tmp_path: Path) -> None:
    with serve_fake(tmp_path, api_servers=2) as served, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, served, ENDLESS)
        wait_until(lambda: messages(served, "AddRequest"), 60, "a request at work")
        os.kill(worker_pid(served, 0), signal.SIGKILL)
        assert refusal(waiting.result(60)) == (503, "engine_closed", True)
        for path in ("/health", "/ready"):
            assert refusal(refused(served, path)) == (503, "engine_closed", True)
        assert "0 starts again after it ended (exit code -9)" in ask(served, 3).json()["error"]["message"]
        wait_until(lambda: is_ready(served), 60, "the worker is back")
        assert served.get("/health").status_code == 200
        assert ask(served, 3).status_code == 200


def test_ready_says_that_the_engines_own_process_was_killed_until_another_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDCORE_TEST_MARKER", str(tmp_path / "marker"))
    with serve_fake(tmp_path, kind="apart") as served:
        assert served.get("/ready").status_code == 200
        (engine_pid,) = (pid for pid, command in served.pids().items() if "support.fake_child" in command)
        os.kill(engine_pid, signal.SIGKILL)
        wait_until(lambda: not is_ready(served), 60, "the server says so")
        wait_until(lambda: "SIGKILL" in served.get("/ready").text, 60, "and why")
        reply = served.get("/ready")
        assert refusal(reply) == (503, "engine_closed", True)
        assert f"0 waits for its engine (The engine process {engine_pid} was killed by signal 9" in reply.text
        assert served.get("/health").status_code == 200
        (tmp_path / "marker-go").touch()
        wait_until(lambda: is_ready(served), 60, "another one is there")
        assert served.terminate() == 0
        wait_until(lambda: not served.pids(), 60, "no process left")


def test_a_worker_that_cannot_start_again_ends_a_server_that_has_no_other(tmp_path: Path) -> None:
    with serve_fake(tmp_path, kind="once") as served:
        os.kill(worker_pid(served, 0), signal.SIGKILL)
        assert served.process.wait(60) == 1
        wait_until(lambda: not served.pids(), 60, "no process left")
        assert (
            "EngineError: Worker process 0 ended 4 times soon after its start: there is no memory left. So the server stopped"
            in served.tail()
        )


def test_sigterm_lets_streams_end_and_refuses_new_requests_meanwhile(tmp_path: Path) -> None:
    with serve_fake(tmp_path, workers=2, api_servers=2) as served:
        lines = stream_lines(served, 8_000)
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_ready(served), 60, "a server that drains")
        for _ in range(4):
            assert refusal(ask(served, 3)) == (503, "engine_closed", True)
        assert served.get("/health").status_code == 200
        last = [line for line in lines if line]
        assert (last[-1], errors_in(last)) == ("data: [DONE]", [])
        assert served.process.wait(60) == 0
        wait_until(lambda: not served.pids(), 60, "no process left")


def test_what_is_still_open_when_the_time_to_drain_is_over_ends_with_an_error(tmp_path: Path) -> None:
    with serve_fake(tmp_path, drain_timeout_s=0.5) as served:
        lines = stream_lines(served, ENDLESS)
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        (error,) = errors_in(list(lines))
        assert "did not end within 0.5 s; send it again" in error
        assert served.process.wait(60) == 0
        wait_until(lambda: not served.pids(), 60, "no process left")


# ---- real schedulers over a fake model: routing and metrics


def complete(served: Served, prompt: list[int]) -> int:
    """Prompt tokens that came from a cache."""
    reply = httpx.post(served.url + "/v1/completions", json={"model": "fake", "prompt": prompt, "max_tokens": 4}, timeout=60)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def series(served: Served, name: str, **labels: str) -> dict[str, float]:
    """`engine` -> the sum of its samples of this name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(served.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                found[sample.labels["engine"]] = found.get(sample.labels["engine"], 0.0) + sample.value
    return found


def test_prefixes_find_their_worker_through_any_api_server_and_each_request_is_counted_once(tmp_path: Path) -> None:
    families = [[(7 * family + token) % 41 for token in range(100)] for family in range(4)]
    with serve_fake(tmp_path, workers=2, api_servers=2, kind="scheduled") as served:

        def routed() -> list[str]:
            return [one["routing"] for one in served.get("/v1/requests?limit=1000").json()["data"]]

        def all_are_known() -> bool:
            """So many requests come to either API server."""
            before = len(routed())
            for prefix in families * 3:
                complete(served, [*prefix, 2])
            wait_until(lambda: len(routed()) == before + 12, 60, "each request told")
            return routed()[:12] == ["prefix"] * 12

        for prefix in families:
            complete(served, [*prefix, 1])
        wait_until(lambda: len(routed()) == 4, 60, "each request told")
        wait_until(all_are_known, 60, "the API servers have told each other")
        num_warm_up = sum(series(served, "pagedcore_requests_total").values())
        cached = [complete(served, [*prefix, number]) for number in range(3, 9) for prefix in families]
        assert cached == [96] * 24, "every prompt came to the worker that has its prefix"

        def num_completed() -> float:
            return sum(series(served, "pagedcore_requests_total", status="completed").values())

        wait_until(lambda: num_completed() == num_warm_up + 24, 60, "each request counted")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: complete(served, [number % 41] * 50), range(32)))
        wait_until(lambda: num_completed() == num_warm_up + 56, 60, "each request counted")
        per_engine = series(served, "pagedcore_requests_total")
        assert set(per_engine) == {"0", "1"}
        assert min(per_engine.values()) > 0
        tokens = series(served, "pagedcore_generation_tokens_total")
        assert tokens == {engine: 4 * number for engine, number in per_engine.items()}
        assert routed().count("prefix") >= 12 + 24
        assert set(routed()) <= {"load", "prefix", "overload"}


def test_what_a_killed_worker_had_open_is_told_and_counted_once(tmp_path: Path) -> None:
    def num(name: str, **labels: str) -> float:
        return sum(series(served, f"pagedcore_{name}_total", **labels).values())

    def ask_for(number: int) -> httpx.Response:
        sent = {"model": "fake", "prompt": [number] * 20, "max_tokens": 4, "n": 1 + number % 2, "user": f"u{number}"}
        return httpx.post(served.url + "/v1/completions", json=sent, timeout=60)

    with serve_fake(tmp_path, api_servers=2, kind="hanging") as served, ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(ask_for, number) for number in range(6)]
        wait_until(lambda: num("received_requests") == 6, 60, "each at the engine, of which it has not told anybody yet")
        assert num("requests") == 0
        os.kill(worker_pid(served, 0), signal.SIGKILL)
        assert [refusal(reply.result(60)) for reply in waiting] == [(503, "engine_closed", True)] * 6
        assert (num("requests", status="error", adapter="litserve"), num("requests")) == (6, 6), "counted before anybody was told"
        assert series(served, "pagedcore_open_requests") == {}
        assert "(exit code -9) with 6 requests open and starts again" in served.tail()
        wait_until(lambda: is_ready(served), 60, "the worker is back")
        complete(served, [1, 2, 3])
        assert (num("received_requests"), num("requests", status="completed"), num("requests", status="error")) == (7, 1, 6)


def test_the_numbers_of_a_killed_worker_stay_and_its_gauges_go(tmp_path: Path) -> None:
    with serve_fake(tmp_path, workers=2, kind="scheduled") as served:
        for number in range(8):
            complete(served, [number] * 50)
        wait_until(lambda: sum(series(served, "pagedcore_requests_total").values()) == 8, 60, "each request counted")
        before = series(served, "pagedcore_requests_total")
        victim = max(before, key=lambda engine: before[engine])
        assert victim in series(served, "pagedcore_open_requests")
        os.kill(worker_pid(served, int(victim)), signal.SIGKILL)
        wait_until(lambda: victim not in series(served, "pagedcore_open_requests"), 60, "no gauge of a dead process")
        assert series(served, "pagedcore_requests_total") == before
        wait_until(lambda: is_ready(served), 60, "the worker is back")
        wait_until(lambda: victim in series(served, "pagedcore_open_requests"), 60, "the gauges of its next life")
        for number in range(8, 24):
            complete(served, [number] * 50)
        wait_until(lambda: sum(series(served, "pagedcore_requests_total").values()) == 24, 60, "each request counted once more")
        assert series(served, "pagedcore_requests_total")[victim] > before[victim]
