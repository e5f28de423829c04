"""The parts of the LitServe adapter, each alone: the worker's bridge, placement, building, the metrics folder."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedcore import ConfigError, EngineClosedError, EngineConfig, SamplingParams
from pagedcore.messages import AbortRequest, AddRequest, FinishRequest, RequestUpdate
from pagedcore.openai import ServerSettings
from pagedcore_adapters import _litserve_placement as placement
from pagedcore_adapters import _litserve_plain_api, litserve_api
from pagedcore_adapters import _prometheus_dir as prometheus_dir
from pagedcore_adapters._litserve_address import check_address
from pagedcore_adapters._litserve_messages import Drain, Sender, Traffic, WorkerFacts, WorkerLost, WorkerReady
from pagedcore_adapters._litserve_processes import handler_of_signals
from pagedcore_adapters._litserve_server import PagedServer, ServerOptions
from pagedcore_adapters._litserve_worker import WorkerBridge
from pagedcore_adapters._litserve_worker_api import WorkerAPI
from support.fake_engine import ANSWER, FakeLoop, make_byte_tokenizer
from support.served import wait_until


def add(request_id: str) -> AddRequest:
    return AddRequest(request_id=request_id, group_id=request_id, prompt_token_ids=[1], params=SamplingParams(max_tokens=5), arrival_s=0.0)


def last_update(request_id: str) -> RequestUpdate:
    return RequestUpdate(request_id=request_id, new_token_ids=[], finish_reason="stop", status="completed")


# ---- the worker's bridge


class Inbox:
    """A control queue of messages known beforehand, then a manager that is gone."""

    def __init__(self, *messages: Any) -> None:
        self.messages = list(messages)
        self.may_end = lambda: True

    def put(self, item: Any) -> None:
        raise AssertionError("a worker never writes its control queue")

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.messages:
            return self.messages.pop(0)
        if self.may_end():
            raise EOFError
        raise queue.Empty


def make_bridge(loop: FakeLoop, inbox: Inbox, send: Callable[..., object], incarnation: int = 0) -> WorkerBridge:
    return WorkerBridge(loop, inbox, send, lambda *_: [{}], incarnation)  # type: ignore[arg-type]


def started(loop: FakeLoop) -> FakeLoop:
    loop.start()
    return loop


def no_message(block: bool = True, timeout: float | None = None) -> Any:
    raise queue.Empty


def test_updates_go_back_to_the_api_server_that_asked_one_message_a_step_at_most(tmp_path: Path) -> None:
    loop = started(FakeLoop(make_byte_tokenizer(tmp_path)))
    loop._is_gathering, loop.gather = True, 3
    inbox = Inbox((Sender(0), add("a")), (Sender(0), add("b")), (Sender(1), add("c")))
    sent: list[tuple[int, list[RequestUpdate]]] = []
    bridge = make_bridge(loop, inbox, lambda queue_id, updates: sent.append((queue_id, list(updates))))
    inbox.may_end = lambda: sum(update.finish_reason is not None for _, updates in sent for update in updates) == 3
    bridge.serve()
    by_server = {queue_id: {update.request_id for one, updates in sent if one == queue_id for update in updates} for queue_id in (0, 1)}
    assert by_server == {0: {"a", "b"}, 1: {"c"}}
    assert len([1 for queue_id, _ in sent if queue_id == 0]) <= 5
    tokens = [t for queue_id, updates in sent if queue_id == 1 for update in updates for t in update.new_token_ids]
    assert loop.text.decode(tokens) == ANSWER[:5]


def test_the_engine_is_closed_when_the_server_is_gone(tmp_path: Path) -> None:
    loop = started(FakeLoop(make_byte_tokenizer(tmp_path)))
    make_bridge(loop, Inbox(), lambda *_: None).serve()
    assert loop.is_closed


def test_a_worker_whose_engine_has_ended_ends_too_and_says_why(tmp_path: Path) -> None:
    loop = started(FakeLoop(make_byte_tokenizer(tmp_path)))
    loop.close()
    inbox = Inbox()
    inbox.may_end = lambda: False
    with pytest.raises(EngineClosedError, match="The engine is closed"):
        make_bridge(loop, inbox, lambda *_: None).serve()


def test_a_worker_looks_after_its_engine_at_each_turn_also_while_nothing_comes(tmp_path: Path) -> None:
    loop = started(FakeLoop(make_byte_tokenizer(tmp_path)))
    inbox, looks = Inbox(), []
    bridge = make_bridge(loop, inbox, lambda *_: None)
    bridge._look = lambda: looks.append(len(looks)) or (len(looks) == 3 and bridge.stop_when_idle())  # type: ignore[func-returns-value]
    inbox.get = no_message  # type: ignore[method-assign]
    bridge.serve()
    assert looks == [0, 1, 2]


def test_a_request_that_a_closed_engine_cannot_take_gets_its_error(tmp_path: Path) -> None:
    loop = started(FakeLoop(make_byte_tokenizer(tmp_path)))
    sent: list[RequestUpdate] = []
    bridge = make_bridge(loop, Inbox((Sender(0), add("a")), (Sender(0), AbortRequest("a"))), lambda _, updates: sent.extend(updates))
    bridge._sender.start()
    loop.close()
    bridge._take()
    bridge._take()
    wait_until(lambda: sent, 60, "the error's update")
    assert [(update.request_id, type(update.error)) for update in sent] == [("a", EngineClosedError)]


def test_a_worker_told_to_stop_ends_only_after_its_open_requests_and_sends_all_of_them(tmp_path: Path) -> None:
    loop = started(FakeLoop(make_byte_tokenizer(tmp_path)))
    inbox = Inbox((Sender(0), add("a")), (Sender(0), AbortRequest("gone")), (Sender(1), add("b")))
    inbox.may_end = lambda: False
    sent: list[RequestUpdate] = []
    bridge = make_bridge(loop, inbox, lambda _, updates: sent.extend(updates))
    bridge._take()
    bridge.stop_when_idle()
    bridge.serve()
    ended = [update.request_id for update in sent if update.finish_reason is not None]
    assert "a" in ended
    assert "b" in ended or inbox.messages, "a request that was taken has its end"
    assert loop.is_closed


def test_a_worker_told_to_stop_while_idle_ends_at_once(tmp_path: Path) -> None:
    loop = started(FakeLoop(make_byte_tokenizer(tmp_path)))
    inbox = Inbox((Sender(0), add("never taken")))
    bridge = make_bridge(loop, inbox, lambda *_: None)
    bridge.stop_when_idle()
    bridge.serve()
    assert len(inbox.messages) == 1


def test_what_was_meant_for_an_earlier_life_of_the_worker_is_dropped(tmp_path: Path) -> None:
    loop = started(FakeLoop(make_byte_tokenizer(tmp_path)))
    inbox = Inbox((Sender(0, 1), add("for the dead")), (Sender(0, 2), add("mine")), (Sender(0, 1), AbortRequest("mine")))
    sent: list[RequestUpdate] = []
    bridge = make_bridge(loop, inbox, lambda _, updates: sent.extend(updates), incarnation=2)
    inbox.may_end = lambda: bool(sent) and sent[-1].finish_reason is not None
    bridge.serve()
    assert [request.request_id for request in loop.requests] == ["mine"]
    assert [(end.request.group_id, end.status) for end in loop.lost] == [("for the dead~lost", "error")], "nobody else counts it"
    assert (sent[-1].request_id, sent[-1].finish_reason) == ("mine", "length")


def test_steps_that_pile_up_travel_together(tmp_path: Path) -> None:
    bridge = make_bridge(FakeLoop(make_byte_tokenizer(tmp_path)), Inbox(), lambda *_: None)
    for queue_id, name in [(0, "a"), (1, "b"), (0, "c")]:
        bridge._post(queue_id, [last_update(name)])
    batches = bridge._next_batches()
    assert {queue_id: [update.request_id for update in updates] for queue_id, updates in batches.items()} == {0: ["a", "c"], 1: ["b"]}


def test_what_crosses_the_border_survives_pickling() -> None:
    import pickle  # noqa: TID251  what multiprocessing does

    facts = WorkerFacts(plan=None, info=None)  # type: ignore[arg-type]
    error = EngineClosedError("gone", retry_after_s=7.0)
    update = RequestUpdate(request_id="a", new_token_ids=[1], error=error)
    news = (WorkerReady(1, 2), WorkerLost(1, "exit code -9"), Traffic(0, [(1, [])], [1, 0]), Drain(1.0))
    for value in (facts, Sender(3, 4), add("a"), AbortRequest("a"), FinishRequest("a", 1, "x"), *news):
        assert pickle.loads(pickle.dumps(value)) == value
    copy = pickle.loads(pickle.dumps(update))
    assert (str(copy.error), copy.error.retry_after_s, copy.new_token_ids) == ("gone", 7.0, [1])


# ---- placement


@pytest.mark.parametrize(
    ("device", "devices", "num_gpus", "expected"),
    [
        ("auto", "auto", 0, placement.Placement("cpu", 1)),
        ("cpu", "auto", 4, placement.Placement("cpu", 1)),
        ("auto", "auto", 4, placement.Placement("cuda", 4)),
        ("cuda", 2, 4, placement.Placement("cuda", 2)),
        ("auto", [1, 3], 4, placement.Placement("cuda", [1, 3])),
        ("cuda:2", "auto", 4, placement.Placement("cuda", [2])),
    ],
)
def test_workers_are_placed_where_the_config_says(
    monkeypatch: pytest.MonkeyPatch, device: str, devices: placement.Devices, num_gpus: int, expected: placement.Placement
) -> None:
    monkeypatch.setattr(placement, "num_gpus", lambda: num_gpus)
    assert placement.choose_placement(EngineConfig(device=device), devices, 1) == expected


@pytest.mark.parametrize(
    ("device", "devices", "workers", "message"),
    [
        ("cuda:2", "auto", 1, "2 CUDA devices are visible"),
        ("cpu", 2, 1, "workers_per_device"),
        ("cuda:1", 2, 1, "devices is 2"),
        ("cuda", 1, 2, "gpu_memory_utilization"),
    ],
)
def test_contradicting_placements_are_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, devices: placement.Devices, workers: int, message: str
) -> None:
    monkeypatch.setattr(placement, "num_gpus", lambda: 2)
    with pytest.raises(ConfigError, match=message):
        placement.choose_placement(EngineConfig(device=device), devices, workers)


# ---- building


@pytest.fixture
def no_metrics_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_litserve_plain_api, "ensure_multiprocess_dir", lambda: "")


@pytest.mark.usefixtures("no_metrics_dir")
def test_a_server_is_built_from_a_config_a_mapping_or_nothing() -> None:
    for config in (None, {"block_size": 32, "device": "cpu"}, EngineConfig(device="cpu")):
        assert litserve_api.build_server(config).lit_api.config.device in ("auto", "cpu")
    with pytest.raises(ConfigError, match="block_sise"):
        litserve_api.build_server({"block_sise": 32})
    with pytest.raises(ConfigError, match="cannot be read"):
        litserve_api.build_server({"device": "cpu"}, warmup_file="/no/such/file")


@pytest.mark.usefixtures("no_metrics_dir")
def test_warm_up_prompts_are_read_in_the_main_process(tmp_path: Path) -> None:
    file = tmp_path / "warm.txt"
    file.write_text("one\n\ntwo\n", encoding="utf-8")
    assert litserve_api.build_server({"device": "cpu"}, warmup_file=file).lit_api.warm_up_prompts == ("one", "two")


def test_the_metrics_folder_is_made_once_and_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prometheus_dir.VARIABLE, "restored after the test")
    monkeypatch.delenv(prometheus_dir.VARIABLE)
    folder = prometheus_dir.ensure_multiprocess_dir()
    assert Path(folder).is_dir()
    assert os.environ[prometheus_dir.VARIABLE] == folder
    assert prometheus_dir.ensure_multiprocess_dir() == folder


def test_what_ended_processes_of_ours_left_in_a_given_folder_is_removed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale, foreign, running = (
        tmp_path / name for name in (f"counter_{ended.pid}.db", f"histogram_{ended.pid}.db", f"counter_{os.getpid()}.db")
    )
    for path, content in ((stale, b"x pagedcore_y"), (foreign, b"x other_y"), (running, b"x pagedcore_y"), (tmp_path / "notes.txt", b"")):
        path.write_bytes(content)
    monkeypatch.setenv(prometheus_dir.VARIABLE, str(tmp_path))
    prometheus_dir.ensure_multiprocess_dir()
    assert sorted(tmp_path.iterdir()) == sorted([foreign, running, tmp_path / "notes.txt"])


def test_a_metrics_folder_that_cannot_be_used_is_a_config_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv(prometheus_dir.VARIABLE, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"PROMETHEUS_MULTIPROC_DIR is '.*file', which cannot be used"):
        prometheus_dir.ensure_multiprocess_dir()


def test_a_damaged_metrics_file_costs_the_metrics_and_no_exception(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(prometheus_dir.VARIABLE, str(tmp_path))
    (tmp_path / "counter_1.db").write_bytes(b"")
    assert prometheus_dir.multiprocess_metrics()[0].startswith(b"# pagedcore: metrics cannot be read:")


@pytest.mark.parametrize(
    ("name", "worker_id", "label"), [("0", 0, "0"), ("0", 1, "1"), ("replica-7", 0, "replica-7"), ("replica-7", 1, "replica-7-1")]
)
def test_the_engine_label_is_the_workers_number_or_the_configured_name(name: str, worker_id: int, label: str) -> None:
    assert prometheus_dir.engine_label(EngineConfig(metrics_instance=name), worker_id) == label


# ---- the address


@pytest.mark.parametrize(
    ("host", "port", "message"), [("localhost", 8000, "'localhost'"), ("127.0.0.1", 80, "1024 to 65535"), ("127.0.0.1", 70000, "65535")]
)
def test_an_address_that_litserve_does_not_take_is_a_config_error(host: str, port: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_address(host, port)


def test_a_port_that_another_program_listens_on_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 cannot be used"):
            check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)


def test_a_given_metrics_folder_is_used_and_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(prometheus_dir.VARIABLE, str(tmp_path / "a" / "b"))
    assert prometheus_dir.ensure_multiprocess_dir() == str(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    text, content_type = prometheus_dir.multiprocess_metrics()
    assert (text, content_type.split(";")[0]) == (b"", "text/plain")


def end_slowly(server: PagedServer, said: Any) -> None:
    """The body of a child that is told to end, and told again while it does."""
    with handler_of_signals(server._stop):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            said.send("it goes on")
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            said.send("it has ended in order")


def test_a_child_of_the_server_ends_once_whatever_signals_follow() -> None:
    server = PagedServer(WorkerAPI(EngineConfig()), ServerSettings(), placement.Placement("cpu", 1), ServerOptions())
    heard, said = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=end_slowly, args=(server, said))
    child.start()
    said.close()
    assert heard.poll(60)
    assert heard.recv() == "it has ended in order"
    child.join(60)
    assert child.exitcode == 0
    heard.close()
