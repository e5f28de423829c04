"""`pagedcore engine`, and `pagedcore serve` over it: processes that attach, drain and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from pagedcore import AsyncEngine, SamplingParams, cli
from pagedcore.commands.engine_process import Signals, engine_greeting, run_engine, served_engine
from pagedcore.commands.http_front import listen
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError, EngineClosedError, EngineError
from support.engine_builder import expected_tokens, make_engine
from support.remote_engines import short_folder, wait_for
from support.served import Served, free_port, serve, wait_until

ENDLESS = SamplingParams(temperature=0.0, max_tokens=200)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def fails(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0)


# ---- one engine


def test_a_signal_lets_running_requests_end(folder: Path) -> None:
    built, signals = make_engine(gate_open=False), Signals()
    with served_engine(EngineConfig(), folder / "e.sock", lambda _: built.engine) as (engine, server), ThreadPoolExecutor(2) as pool:
        front = AsyncEngine.connect(folder / "e.sock")
        last = pool.submit(lambda: list(front.generate_sync([1], ENDLESS))[-1])
        wait_for(lambda: server.num_open == 1, "it is there")
        life = pool.submit(run_engine, engine, server, signals, 20.0)
        signals.take()
        wait_for(lambda: not asyncio.run(front.is_ready()), "it drains")
        with pytest.raises(EngineClosedError, match="draining"):
            next(front.generate_sync([2], ENDLESS))
        assert not life.done()
        built.runner.gate.set()
        assert last.result(60).outputs[0].token_ids == expected_tokens([1], 200)
        life.result(60)
        front.close_sync()
    assert [path.name for path in folder.iterdir()] == ["e.sock.lock"]


@pytest.mark.parametrize(("drain_timeout_s", "num_signals"), [(0.05, 1), (20.0, 2)], ids=["no-time-left", "second-signal"])
def test_requests_that_take_too_long_end_as_aborted(folder: Path, drain_timeout_s: float, num_signals: int) -> None:
    built, signals = make_engine(gate_open=False), Signals()
    with ThreadPoolExecutor(1) as pool:
        with served_engine(EngineConfig(), folder / "e.sock", lambda _: built.engine) as (engine, server):
            front = AsyncEngine.connect(folder / "e.sock")
            last = pool.submit(lambda: list(front.generate_sync([1], ENDLESS))[-1])
            wait_for(lambda: server.num_open == 1, "it is there")
            for _ in range(num_signals):
                signals.take()
            run_engine(engine, server, signals, drain_timeout_s)
            assert server.num_open == 1
            threading.Timer(0.1, built.runner.gate.set).start()
        assert last.result(60).status == "aborted"
        front.close_sync()


def test_an_engine_that_stops_by_itself_ends_the_command(folder: Path) -> None:
    built = make_engine()
    with served_engine(EngineConfig(), folder / "e.sock", lambda _: built.engine) as (engine, server):
        built.loop.close()
        with pytest.raises(EngineError, match="stopped by itself"):
            run_engine(engine, server, Signals(), 1.0)
    assert not (folder / "e.sock").exists()


def test_the_path_is_claimed_before_the_model_is_loaded(folder: Path) -> None:
    def never(_: EngineConfig) -> AsyncEngine:
        raise AssertionError("the model must not be loaded")

    (folder / "e.sock").touch()
    with pytest.raises(ConfigError, match="is no socket"), served_engine(EngineConfig(), folder / "e.sock", never):
        pass
    with pytest.raises(ConfigError, match="leave out --isolation"), served_engine(EngineConfig(isolation="process"), folder / "x", never):
        pass


def test_a_path_is_free_again_after_a_failure(folder: Path) -> None:
    def broken(_: EngineConfig) -> AsyncEngine:
        raise EngineError("no device")

    for _ in range(2):
        with pytest.raises(EngineError, match="no device"), served_engine(EngineConfig(), folder / "e.sock", broken):
            pass


def test_the_greeting_says_how_to_attach() -> None:
    from rich.console import Console

    built = make_engine()
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    console.print(engine_greeting(built.engine, Path("/run/[a]/e.sock")))
    text = console.export_text()
    assert 'AsyncEngine.connect("/run/[a]/e.sock")' in text
    assert "pagedcore serve --socket /run/[a]/e.sock" in text
    assert "256 KV blocks of 8 tokens" in text
    built.engine.close_sync()
    console.file.close()


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--socket", "/run/e.sock", "--block-size", "32"], "--block-size is a setting of the engine"),
        (["serve", "--socket", "/run/e.sock", "some-model"], "--model is a setting of the engine"),
        (["serve", "--socket", "/run/e.sock", "--warmup-file", "x"], "--warmup-file is a setting of the engine"),
        (["serve", "--fronts", "2", "--num-api-servers", "2"], "--num-api-servers are LitServe's"),
        (["engine", "--socket", "/run/e.sock", "--isolation", "process"], "leave out --isolation"),
        (["engine", "--socket", "/run/" + "x" * 200], "at most 103 are possible"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_refused_by_name() -> None:
    port = free_port()
    with listen("127.0.0.1", port) as busy:
        busy.listen()
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 cannot be used"):
            listen("127.0.0.1", port)


# ---- processes


@contextmanager
def engine_process(folder: Path, model: str = "fake") -> Iterator[Served]:
    path = str(folder / "e.sock")
    with serve(["-m", "support.fake_engine_process", path, model], folder / "engine.log", port=0, ready_path=None) as running:
        AsyncEngine.connect(path, timeout_s=60.0).close_sync()
        yield running


@contextmanager
def http_fronts(folder: Path, *options: str) -> Iterator[Served]:
    port = free_port()
    arguments = ["-m", "pagedcore", "serve", "--socket", str(folder / "e.sock"), "--port", str(port), *options]
    with serve(arguments, folder / "fronts.log", port=port) as running:
        yield running


@contextmanager
def closing_front(folder: Path) -> Iterator[AsyncEngine]:
    front = AsyncEngine.connect(folder / "e.sock")
    try:
        yield front
    finally:
        front.close_sync()


def complete(served: Served, prompt: list[int], **more: object) -> httpx.Response:
    """Each call is a connection of its own, which the kernel gives to any of the fronts."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
    return httpx.post(served.url + "/v1/completions", json=body, timeout=60)


def front_pids(served: Served) -> list[int]:
    return [pid for pid, command in served.pids().items() if "http_front" in command]


def cached(reply: httpx.Response) -> int:
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.serve
def test_fronts_share_one_engine_and_show_its_numbers_whichever_is_asked(folder: Path) -> None:
    prompt = list(range(40))
    with engine_process(folder) as engine, http_fronts(folder, "--fronts", "2") as served:
        assert len(front_pids(served)) == 2
        assert not served.loads("libtorch"), "a front needs no torch"
        assert [cached(complete(served, prompt)) for _ in range(8)] == [0] + [32] * 7
        scraped = {_line(served.get("/metrics").text, "pagedcore_prefix_cache_hit_tokens_total", 'source="pool"') for _ in range(8)}
        assert len(scraped) == 1
        assert scraped.pop().endswith(" 224.0")
        assert _line(
            served.get("/metrics").text, "pagedcore_requests_total", 'adapter="library",class="",engine="0",finish_reason="length"'
        ).endswith(" 8.0")
        os.kill(front_pids(served)[0], signal.SIGKILL)
        wait_until(lambda: len(front_pids(served)) == 2, 60, "another front")
        assert [cached(complete(served, prompt)) for _ in range(4)] == [32] * 4
        assert served.terminate() == 0
        wait_until(lambda: not served.pids(), 60, "no front is left")
        assert engine.terminate() == 0
        assert not (folder / "e.sock").exists()


@pytest.mark.serve
def test_a_front_that_is_killed_while_it_starts_gets_a_successor_and_the_other_one_goes_on(folder: Path) -> None:
    port = free_port()
    arguments = ["-m", "pagedcore", "serve", "--socket", str(folder / "e.sock"), "--port", str(port), "--fronts", "2"]
    with engine_process(folder), serve(arguments, folder / "fronts.log", port=port, ready_path=None) as served:
        wait_until(lambda: len(front_pids(served)) == 2, 60, "two processes")
        late = max(front_pids(served))
        os.kill(late, signal.SIGSTOP)
        wait_until(lambda: served.is_ready("/ready"), 60, "the other one answers")
        os.kill(late, signal.SIGKILL)
        wait_until(lambda: "Talk to it" in served.tail(), 60, "both are ready")
        assert len(front_pids(served)) == 2
        assert complete(served, [1, 2]).status_code == 200
        assert served.terminate() == 0


@pytest.mark.serve
def test_an_engine_that_is_killed_and_started_again_serves_the_same_front(folder: Path) -> None:
    with engine_process(folder) as first, http_fronts(folder) as served, ThreadPoolExecutor(1) as pool:
        assert complete(served, [1, 2]).status_code == 200
        lost = pool.submit(complete, served, [1, 2], max_tokens=3000)
        with closing_front(folder) as front:
            wait_until(lambda: front.stats().num_running == 1, 60, "it runs")
        first.process.kill()
        assert lost.result(60).status_code == 503
        wait_until(lambda: served.get("/ready").status_code == 503, 60, "the front says so")
        refused = complete(served, [1, 2])
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
        with engine_process(folder):
            wait_until(lambda: served.get("/ready").status_code == 200, 60, "the front is back")
            assert complete(served, [1, 2]).status_code == 200
            ended = 'status="error"'
            wait_until(lambda: _line(served.get("/metrics").text, "pagedcore_requests_total", ended).endswith(" 1.0"), 60, "it is counted")
            assert served.terminate() == 0


@pytest.mark.serve
def test_signals_let_open_answers_end_in_the_front_and_in_the_engine(folder: Path) -> None:
    with engine_process(folder, "slow") as engine, http_fronts(folder) as served, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(complete, served, [1, n], max_tokens=60) for n in range(2)]
        front = AsyncEngine.connect(folder / "e.sock")
        wait_until(lambda: front.stats().num_running == 2, 60, "both run")
        ends: list[Callable[[], int]] = [served.terminate, engine.terminate]
        codes = [pool.submit(end) for end in ends]
        assert [answer.result(60).json()["usage"]["completion_tokens"] for answer in answers] == [60, 60]
        assert [code.result(60) for code in codes] == [0, 0]
        front.close_sync()


@pytest.mark.serve
def test_answers_that_take_longer_than_the_drain_end_as_aborted_and_whole(folder: Path) -> None:
    with engine_process(folder, "slow"), http_fronts(folder, "--drain-timeout-s", "0") as served, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(complete, served, [1, n], max_tokens=3000, stream=bool(n)) for n in range(2)]
        with closing_front(folder) as front:
            wait_until(lambda: front.stats().num_running == 2, 60, "both run")
            assert served.terminate() == 0
            wait_until(lambda: front.stats().num_running == 0, 60, "both are aborted")
        whole, stream = (answer.result(60) for answer in answers)
        assert whole.json()["choices"][0]["finish_reason"] == "abort"
        assert '"finish_reason":"abort"' in stream.text
        assert stream.text.endswith("data: [DONE]\n\n")
        assert "Traceback" not in (folder / "fronts.log").read_text()


@pytest.mark.serve
@pytest.mark.model
def test_the_embedded_model_serves_through_fronts_of_its_own(folder: Path) -> None:
    port = free_port()
    arguments = ["-m", "pagedcore", "serve", "--fronts", "2", "--port", str(port), "--num-kv-blocks", "64"]
    with serve(arguments, folder / "log", port=port) as served:
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8, "temperature": 0}
        replies = [httpx.post(served.url + "/v1/chat/completions", json=body, timeout=60).json() for _ in range(4)]
        assert {reply["choices"][0]["message"]["content"] for reply in replies} == {"The capital of France is Paris."}
        assert len(served.loads("libtorch")) == 1, "the engine alone"
        assert served.terminate() == 0
        wait_until(lambda: not served.pids(), 60, "nothing is left")


def _line(text: str, name: str, part: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(name) and part in line)
