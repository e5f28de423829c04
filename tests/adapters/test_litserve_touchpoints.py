"""Each thing that `_litserve_hooks` uses of LitServe beyond its documented surface is as it expects."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import signal
import sys
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import litserve
import pytest
from litserve import connector
from litserve.loops import loops
from litserve.loops.base import LitLoop
from litserve.server import LitServer
from litserve.specs.base import LitSpec
from litserve.transport.process_transport import MPQueueTransport
from litserve.utils import WorkerSetupStatus

from pagedcore import EngineConfig, EngineError
from pagedcore.openai import ServerSettings
from pagedcore_adapters import _litserve_hooks as hooks
from pagedcore_adapters._litserve_placement import Placement
from pagedcore_adapters._litserve_server import PagedServer, ServerOptions
from pagedcore_adapters._litserve_supervisor import Supervisor
from pagedcore_adapters._litserve_worker_api import WorkerAPI


def make_server(*, workers: int = 1) -> PagedServer:
    options = ServerOptions(workers_per_device=workers, num_api_servers=2)
    return PagedServer(WorkerAPI(EngineConfig()), ServerSettings(), Placement("cpu", 1), options)


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_pinned_version_is_installed() -> None:
    assert litserve.__version__.startswith("0.2.")


def test_the_manager_is_made_by_init_manager_and_its_queues_reach_the_workers() -> None:
    assert parameters(LitServer._init_manager) == ["self", "num_api_servers"]
    lit_server = make_server(workers=3)
    manager = lit_server._init_manager(2)
    try:
        assert lit_server._manager_pid in {process.pid for process in multiprocessing.active_children()}
        assert len(lit_server.lit_api.controls) == 3
        lit_server.lit_api.controls[2].put((1, "message"))
        assert lit_server.lit_api.controls[2].get(timeout=60) == (1, "message")
        assert lit_server._transport._queues.__len__() == 2
    finally:
        manager.shutdown()


def test_one_entry_a_worker_in_the_workers_config() -> None:
    lit_server = make_server(workers=3)
    assert len(lit_server._inference_workers_config_for_api(lit_server.lit_api.api_path)) == 3


def test_monitoring_starts_after_the_api_servers_with_the_worker_processes_known() -> None:
    assert parameters(LitServer._start_worker_monitoring) == ["self", "manager", "uvicorn_workers"]
    source = inspect.getsource(LitServer.run)
    assert (
        0
        < source.index("self.inference_workers.extend(")
        < source.index("self._start_server(")
        < source.index("self._start_worker_monitoring(")
    )


def test_litserves_own_monitoring_which_ends_all_with_a_worker_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LitServer, "_start_worker_monitoring", lambda *_: pytest.fail("LitServe's own monitoring was started"))
    ran = threading.Event()
    monkeypatch.setattr(Supervisor, "run", lambda _: ran.set())
    lit_server = make_server()
    lit_server.inference_workers = []
    lit_server._start_worker_monitoring(None, {0: threading.current_thread()})  # type: ignore[arg-type]
    assert ran.wait(60.0)
    assert isinstance(lit_server._supervisor, Supervisor)


def test_a_worker_is_started_again_by_the_public_method_in_its_next_life_with_ctrl_c_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parameters(LitServer.launch_single_inference_worker) == ["self", "lit_api", "worker_id"]
    lit_server = make_server(workers=2)
    lit_server.lit_api.incarnations = [0, 3]
    calls: list[tuple[int, bool, list[int]]] = []

    def launch(self: LitServer, lit_api: WorkerAPI, worker_id: int) -> Any:
        calls.append((worker_id, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()), list(lit_api.incarnations)))
        return "process"

    monkeypatch.setattr(LitServer, "launch_single_inference_worker", launch)
    assert lit_server.restart_worker(1) == "process"  # type: ignore[comparison-overlap]
    assert calls == [(1, True, [0, 4])]


def test_before_the_end_open_answers_end_on_a_thread_and_nothing_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parameters(LitServer._perform_graceful_shutdown) == ["self", "manager", "uvicorn_workers", "shutdown_reason"]
    assert "self._perform_graceful_shutdown(manager, uvicorn_workers, shutdown_reason)" in inspect.getsource(LitServer.run)
    lit_server, happened = make_server(), list[object]()
    lit_server._supervisor = Supervisor([], {}, lit_server)
    lit_server.on_ending = lambda servers: happened.append((servers, threading.current_thread().name))  # type: ignore[method-assign]
    monkeypatch.setattr(LitServer, "_perform_graceful_shutdown", lambda *arguments: happened.append(arguments[1:]))
    lit_server._perform_graceful_shutdown("manager", {0: "a thread on Windows"}, "normal")  # type: ignore[arg-type]
    assert happened == [({}, "pagedcore-ending"), ("manager", {0: "a thread on Windows"}, "normal")]
    lit_server._supervisor.run()  # returns at once: it is stopped


def test_a_dead_api_server_process_ends_the_run() -> None:
    lit_server = make_server()
    lit_server._shutdown_event = threading.Event()
    lit_server.on_api_server_death(1)
    assert lit_server._shutdown_event.is_set()
    assert lit_server._ended_by_itself == ["HTTP process 1 has ended by itself."]
    assert "self._shutdown_event.wait()" in inspect.getsource(LitServer.run)


def test_a_worker_that_dies_while_it_loads_is_an_error_that_names_it() -> None:
    lit_server = make_server()
    manager = lit_server._init_manager(1)
    try:
        process = multiprocessing.get_context("spawn").Process(target=sys.exit, args=(3,))
        process.start()
        process.join()
        lit_server.inference_workers = [process]
        lit_server.workers_setup_status["completions_0"] = WorkerSetupStatus.STARTING
        with pytest.raises(EngineError, match="Worker process 0 ended with exit code 3 before it was ready"):
            lit_server.verify_worker_status()
        lit_server.workers_setup_status["completions_0"] = WorkerSetupStatus.READY
        lit_server.verify_worker_status()
    finally:
        manager.shutdown()
    assert "self.verify_worker_status()" in inspect.getsource(LitServer.run)


def test_the_processes_of_a_server_are_started_where_ctrl_c_is_blocked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parameters(LitServer.launch_inference_worker) == ["self", "lit_api"]
    lit_server, masks = make_server(), []
    served: list[str] = []
    lit_server.on_serving = lambda: served.append("serving")  # type: ignore[method-assign]
    for name in ("launch_inference_worker", "_start_server"):
        monkeypatch.setattr(LitServer, name, lambda *_: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    lit_server.launch_inference_worker(lit_server.lit_api)
    lit_server._start_server(1, 1, "warning", [], None)
    assert [signal.SIGINT in mask for mask in masks] == [True, True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert served == ["serving"]


@pytest.mark.asyncio
async def test_what_is_sent_in_an_envelope_arrives_as_a_reply() -> None:
    queue: Any = SimpleNamespace(items=deque())
    queue.put = queue.items.append
    queue.get = lambda **_: queue.items.popleft()
    lit_server = make_server()
    lit_server._transport = MPQueueTransport(None, [queue])
    received: list[Any] = []
    arrived = asyncio.Event()
    lit_server.on_reply = lambda payload: (received.append(payload), arrived.set())  # type: ignore[method-assign,func-returns-value,assignment]
    lit_server.on_api_start = received.append  # type: ignore[method-assign]
    lit_server.send_to_api_server(0, "news")
    app = lit_server.app
    app.response_queue_id = 0
    async with lit_server.lifespan(app):
        await asyncio.wait_for(arrived.wait(), 60)
    assert received == [0, "news"]


def test_the_lifespan_of_the_app_is_the_servers_own_method() -> None:
    assert inspect.signature(LitServer.lifespan).parameters.keys() == {"self", "app"}
    assert "lifespan=self.lifespan" in inspect.getsource(LitServer.__init__)
    assert "self.app.response_queue_id = response_queue_id" in inspect.getsource(LitServer._start_server)


class Loop(LitLoop):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)


class Api:
    spec = None
    stream = True
    api_path = "/v1/chat/completions"

    def __init__(self) -> None:
        self.loop = Loop()

    def setup(self, device: str) -> None:
        self.loop.calls.append((device, hooks.current_worker_id()))


def test_a_worker_runs_setup_and_then_the_loop_with_seven_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITSERVE_WORKER_ID", "")
    api, runner = Api(), SimpleNamespace(trigger_event=lambda *_, **__: None)
    loops.inference_worker(api, "cpu", 5, "requests", "transport", {}, runner, False)
    assert api.loop.calls == [("cpu", 5), (api, "cpu", 5, "requests", "transport", {}, runner)]


def test_gpus_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: x)'\necho 'GPU 1: H200 (UUID: y)'\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    connector.check_cuda_with_nvidia_smi.cache_clear()
    try:
        assert hooks.num_gpus() == 2
    finally:
        connector.check_cuda_with_nvidia_smi.cache_clear()
    assert "torch" not in inspect.getsource(connector.check_cuda_with_nvidia_smi.__wrapped__).replace("torch.cuda.device_count() == 1", "")


@pytest.mark.asyncio
async def test_a_spec_without_endpoints_adds_no_route_and_ours_answer_health_and_ready() -> None:
    assert LitSpec().endpoints == []
    app = make_server().app
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        for path in ("/health", "/ready", "/v1/models"):
            reply = await client.get(path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_closed"), path
    assert [route.path for route in app.routes if getattr(route, "path", "").endswith("/health")] == ["/litserve/health"]
