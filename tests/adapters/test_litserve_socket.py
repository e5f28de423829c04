"""LitServe over an engine at a Unix socket: HTTP processes and workers share one pool and one book."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagedcore import ConfigError, EngineClosedError, EngineConfig, SamplingParams
from pagedcore.routing.router import RoutingPolicy
from pagedcore_adapters._litserve_attached import AttachedClient
from pagedcore_adapters._litserve_messages import Drain, WorkerLost
from pagedcore_adapters.litserve_api import PagedCoreAPI, build_server
from support.remote_engines import Hosted, hosted
from support.repository import ROOT
from support.served import Served, free_port, post_and_leave, serve, wait_until

PROMPT = [token % 41 for token in range(100)]


def serve_socket(one: Hosted, kind: str, number: int, tmp_path: Path) -> AbstractContextManager[Served]:
    port, script = free_port(), str(ROOT / "tests" / "support" / "litserve_socket_app.py")
    return serve([script, str(port), str(one.path), kind, str(number)], tmp_path / "server.log", port=port, ready_path="/health")


def labels(one: Hosted) -> set[str]:
    """By which doors requests came, as the engine's books have it."""
    return {record["adapter"] for record in one.built.engine.history.recent()}


def body(**options: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 4, **options}


@pytest.mark.parametrize(
    "make",
    [
        lambda: build_server({"block_size": 32}, socket="/tmp/x.sock"),
        lambda: build_server(socket="/tmp/x.sock", workers_per_device=2),
        lambda: build_server(socket="/tmp/x.sock", devices=1),
        lambda: build_server(socket="/tmp/x.sock", routing=RoutingPolicy()),
        lambda: PagedCoreAPI(EngineConfig(), socket="/tmp/x.sock"),
        lambda: PagedCoreAPI(socket="/tmp/x.sock", warm_up_prompts=["a"]),
    ],
)
def test_what_the_engine_at_a_socket_has_already_is_not_given_again(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"The engine at '/tmp/x\.sock' has its config"):
        make()


@pytest.mark.asyncio
async def test_the_client_of_an_api_server_is_connected_by_its_start_and_drained_by_news() -> None:
    with hosted() as one:
        client, drained = AttachedClient(one.path), asyncio.Event()
        client.receive(Drain(1.0))  # nothing to drain
        with pytest.raises(EngineClosedError, match="not started"):
            client.engine_client()
        client.start(0, [], {}, on_drained=drained.set)
        engine = client.engine_client()
        client.receive(WorkerLost(0, "exit code -9"))
        assert await engine.is_ready()
        outputs = [output async for output in engine.generate(PROMPT, SamplingParams(max_tokens=2))]
        assert outputs[-1].status == "completed"
        client.receive(Drain(60.0))
        assert not await engine.is_ready()
        with pytest.raises(EngineClosedError, match="draining"):
            await anext(engine.generate(PROMPT, SamplingParams(max_tokens=2)))
        await asyncio.wait_for(drained.wait(), 60)
        client.engine_client().close_sync()  # type: ignore[attr-defined]


@pytest.mark.serve
def test_two_api_servers_share_an_engine_abort_there_and_drain(tmp_path: Path) -> None:
    with hosted() as one, serve_socket(one, "openai", 2, tmp_path) as served:
        assert served.get("/ready").status_code == 200

        def complete(_: object) -> int:
            reply = httpx.post(served.url + "/v1/completions", json=body(), timeout=60).json()
            return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

        complete(0)
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(complete, range(16))) == [96] * 16
        assert one.server.num_fronts == 3, "two API servers, and the worker that holds its place"
        assert one.built.engine.stats().num_finished["completed"] == 17
        assert labels(one) == {"litserve"}
        assert len(served.get("/v1/stats").json()["data"]) == 1
        one.built.runner.gate.clear()
        post_and_leave(served.url + "/v1/completions", body(max_tokens=100), lambda: one.server.num_open == 1)
        with ThreadPoolExecutor(1) as pool:
            staying = pool.submit(httpx.post, served.url + "/v1/completions", json=body(max_tokens=3), timeout=60)
            wait_until(lambda: one.server.num_open == 2, 60, "two requests at work")
            served.process.send_signal(signal.SIGTERM)
            wait_until(lambda: served.get("/ready").status_code == 503, 60, "servers that drain")
            refused = httpx.post(served.url + "/v1/completions", json=body(), timeout=60)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_closed")
            one.built.runner.gate.set()
            assert staying.result().json()["usage"]["completion_tokens"] == 3
        assert served.process.wait(60) == 0
        assert one.built.engine.stats().num_finished["aborted"] == 1
        wait_until(lambda: one.server.num_fronts == 0, 60, "the engine goes on alone")


@pytest.mark.serve
def test_two_workers_of_a_stock_litserver_share_an_engine(tmp_path: Path) -> None:
    with hosted() as one, serve_socket(one, "plain", 2, tmp_path) as served:
        wait_until(lambda: one.server.num_fronts == 2, 60, "two workers")
        with ThreadPoolExecutor(4) as pool:
            replies = list(
                pool.map(lambda _: httpx.post(served.url + "/predict", json={"prompt": PROMPT, "max_tokens": 4}, timeout=60), range(8))
            )
        assert [reply.json()["num_output_tokens"] for reply in replies] == [4] * 8
        assert one.built.engine.stats().num_finished["completed"] == 8
        assert labels(one) == {"litserve"}
