"""isolation="process": the engine in a child process, which is started again when it dies and never outlives its parent."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagedcore import EngineConfig
from pagedcore.async_engine import AsyncEngine
from pagedcore.errors import CheckpointError, EngineClosedError, EngineError
from pagedcore.garbage import GarbageHold
from pagedcore.remote import loop as remote_loop
from pagedcore.remote import process, restarts
from pagedcore.remote.loop import RemoteLoop
from pagedcore.remote.process import Supervised
from pagedcore.remote.restarts import MAX_DELAY_S, MAX_FAILURES, SHORT_LIFE_S, Restarts
from support.engine_builder import expected_tokens
from support.remote_engines import ENDLESS, child_engine, child_pid, run, wait_for
from support.repository import ROOT


def run_python(code: str, *, exit_code: int = 0, **env: str) -> str:
    """What a program prints."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "adapters", "tests"))
    full_env = {**os.environ, "PYTHONPATH": paths, **env}
    done = subprocess.run([sys.executable, "-c", code], env=full_env, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == exit_code
    return done.stdout


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def sample(name: str, engine: str, **labels: str) -> float | None:
    """A sample of this process' registry."""
    from prometheus_client import REGISTRY

    for family in REGISTRY.collect():
        for one in family.samples:
            if one.name == name and one.labels["engine"] == engine and labels.items() <= one.labels.items():
                return float(one.value)
    return None


def test_an_engine_in_a_child_process_is_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[GarbageHold] = []
    monkeypatch.setattr(GarbageHold, "take", held.append)
    with child_engine(metrics_instance="child-1") as engine:
        pid = child_pid(engine)
        assert pid != os.getpid()
        assert engine.config.isolation == "process"
        assert run(engine, [1, 2, 3]).outputs[0].token_ids == expected_tokens([1, 2, 3], 12)
        engine.warm_up([list(range(20))])
        before = engine.stats()
        assert run(engine, list(range(20))).num_cached_tokens == 16
        assert (engine.stats() - before).num_finished["completed"] == 1
        assert before.num_finished["completed"] == 1, "the warm-up is no traffic"
        engine.check()
        assert engine.reset_prefix_cache()
        engine.trace(tmp_path / "trace.json")
        assert asyncio.run(engine.is_ready())
        assert not held, "what is left out of collections is left out there"
    assert is_gone(pid)
    with pytest.raises(EngineClosedError):
        run(engine, [1])


def test_its_numbers_are_in_this_process_registry_and_exact() -> None:
    with child_engine(metrics_instance="child-2", metrics_compat="vllm") as engine:
        text = asyncio.run(engine.metrics_text())[0].decode()
        assert 'pagedcore_time_to_first_token_seconds_count{engine="child-2",model_name="fake"} 0.0' in text, "also what nobody touched"
        for _ in range(3):
            run(engine, list(range(20)))
        text = asyncio.run(engine.metrics_text())[0].decode()
        assert 'pagedcore_time_to_first_token_seconds_count{engine="child-2",model_name="fake"} 3.0' in text
        assert 'pagedcore_prefix_cache_queries_tokens_total{engine="child-2",model_name="fake",tenant=""} 60.0' in text
        assert sample("vllm:prompt_tokens_total", "child-2") == 60.0
        stats = engine.stats()
        assert sample("pagedcore_prefix_cache_hit_tokens_total", "child-2", source="pool") == stats.prefix_cache_hit_tokens == 32
        assert sample("pagedcore_engine_info", "child-2") == 1.0
        with child_engine(metrics_instance="child-2") as second:
            run(second, [1])
            asyncio.run(second.metrics_text())
            assert sample("pagedcore_time_to_first_token_seconds_count", "child-2-2") == 1.0
            assert second.inspect_sync("stats")[0]["engine"] == "child-2-2", "it is called so everywhere"
    assert sample("pagedcore_engine_info", "child-2") == 0.0
    assert sample("pagedcore_time_to_first_token_seconds_count", "child-2") == 3.0


def test_with_several_processes_of_metrics_it_is_still_the_parent_alone_who_writes(tmp_path: Path) -> None:
    code = (
        "import asyncio, os; from support.remote_engines import child_engine; from pagedcore import SamplingParams\n"
        "with child_engine(metrics_instance='m') as engine:\n"
        "    list(engine.generate_sync([1] * 20, SamplingParams(max_tokens=3)))\n"
        "    text = asyncio.run(engine.metrics_text())[0].decode()\n"
        "print(os.getpid(), [line for line in text.splitlines() if line.startswith('pagedcore_prompt_tokens_total')])"
    )
    pid, _, lines = run_python(code, PROMETHEUS_MULTIPROC_DIR=str(tmp_path)).partition(" ")
    assert lines.strip() == '[\'pagedcore_prompt_tokens_total{engine="m",model_name="fake",tenant=""} 20.0\']'
    assert {path.stem.rpartition("_")[2] for path in tmp_path.iterdir()} == {pid}


def test_requests_that_run_when_it_closes_are_counted_as_aborted() -> None:
    with child_engine(metrics_instance="child-3") as engine:
        stream = engine.generate_sync([1], ENDLESS)
        next(stream)
    *_, last = stream
    assert last.status == "aborted"
    assert sample("pagedcore_requests_total", "child-3", status="aborted", adapter="library") == 1.0
    assert sample("pagedcore_open_requests", "child-3", state="running") == 0.0


def test_a_crash_fails_its_requests_and_another_process_takes_over() -> None:
    with child_engine(metrics_instance="child-4") as engine:
        run(engine, [1])
        asyncio.run(engine.metrics_text())
        stream = engine.generate_sync([1], ENDLESS)
        next(stream)
        pid = child_pid(engine)
        os.kill(pid, signal.SIGKILL)
        *_, last = stream
        assert last.status == "error"
        assert isinstance(last.error, EngineClosedError)
        assert f"The engine process {pid} was killed by signal 9 (SIGKILL)." in str(last.error)
        assert not asyncio.run(engine.is_ready())
        assert asyncio.run(engine.is_alive()), "it is being started again: whoever restarts what is dead has nothing to do"
        with pytest.raises(EngineClosedError, match="SIGKILL"):
            asyncio.run(engine.check_health())
        assert sample("pagedcore_engine_info", "child-4") == 0.0
        wait_for(lambda: asyncio.run(engine.is_ready()), "another one is there")
        assert child_pid(engine) != pid
        assert run(engine, [1]).outputs[0].token_ids == expected_tokens([1], 12)
        asyncio.run(engine.metrics_text())
        assert sample("pagedcore_requests_total", "child-4", finish_reason="length", adapter="library") == 2.0, "counters go on"
        assert sample("pagedcore_engine_info", "child-4") == 1.0


def test_several_quick_deaths_end_it_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("PAGEDCORE_TEST_MARKER", str(tmp_path / "marker"))
    with child_engine(model="dies-later", metrics_instance="child-5") as engine:
        os.kill(child_pid(engine), signal.SIGKILL)
        wait_for(lambda: not engine.loop.is_alive, "it gives up")
        assert not asyncio.run(engine.is_alive())
        with pytest.raises(EngineClosedError, match=r"(?s)ended with exit code 7.*died 4 times.*a device library says: no memory"):
            run(engine, [1])
    assert capfd.readouterr().err.count("a device library says") == MAX_FAILURES - 1


def test_what_goes_wrong_at_the_start_is_raised_as_its_own_kind() -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not there"), child_engine(model="refuses"):
        pass
    with pytest.raises(EngineError, match=r"ended with exit code 7 before it was ready\. It last wrote:\na device library says"):
        AsyncEngine(remote=RemoteLoop(Supervised(EngineConfig(model="dies"), module="support.fake_child")))


def test_it_ends_with_its_parent_however_that_ends() -> None:
    code = (
        "import os, signal; from support.remote_engines import child_engine, child_pid\n"
        "with child_engine(metrics_instance='x') as engine:\n"
        "    print(child_pid(engine), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    pid = int(run_python(code, exit_code=-signal.SIGKILL))
    wait_for(lambda: is_gone(pid), "the child has ended")


def test_a_program_that_just_ends_takes_its_engine_with_it() -> None:
    code = (
        "from support.remote_engines import child_pid; from support.remote_engines import *\n"
        "engine = AsyncEngine(remote=RemoteLoop(Supervised(EngineConfig(metrics_instance='x'), module='support.fake_child')))\n"
        "print(child_pid(engine))"
    )
    assert is_gone(int(run_python(code)))


def test_a_child_whose_engine_has_stopped_for_good_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with child_engine(model="fails", metrics_instance="child-8") as engine:
        pid = child_pid(engine)
        errors = [run(engine, [number + 1]).error for number in range(3)]
        assert "StepFailedError" in {type(error).__name__ for error in errors}
        wait_for(lambda: asyncio.run(engine.is_ready()) and child_pid(engine) != pid, "another process is there")
        assert f"The engine process {pid} ended with exit code 1." in caplog.text, "it ended by itself"


def test_closing_while_it_is_being_started_again_waits_for_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(remote_loop, "CLOSE_TIMEOUT_S", 3600.0)  # waited for, it would outlast the limit of every test
    monkeypatch.setenv("PAGEDCORE_TEST_MARKER", str(tmp_path / "marker"))
    with child_engine(model="hangs-later", metrics_instance="child-9") as engine:
        os.kill(child_pid(engine), signal.SIGKILL)
        wait_for(lambda: (tmp_path / "marker-2").exists(), "the second child hangs in its start")
        pid = engine.loop._source._child.pid
    assert is_gone(pid)


def test_signals_for_all_processes_are_the_parents_to_take() -> None:
    with child_engine(metrics_instance="child-6") as engine:
        pid = child_pid(engine)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        assert run(engine, [1]).status == "completed"
        assert child_pid(engine) == pid


def test_a_forked_process_has_no_engine_and_leaves_the_parents_alone() -> None:
    with child_engine(metrics_instance="child-7") as engine:
        read, write = os.pipe()
        fd = engine.loop._link._channel._sock.fileno()
        pid = os.fork()
        if pid == 0:
            try:
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.fstat(fd)  # or the engine would outlive its parent
                run(engine, [1])
            except EngineClosedError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        os.close(write)
        with os.fdopen(read, "rb") as said:
            assert b"belongs to the process that this one was forked from" in said.read()
        assert run(engine, [1]).status == "completed"


def test_restarts_wait_longer_each_time_and_give_up_on_short_lives_only() -> None:
    policy = Restarts()
    seen = []
    for _ in range(MAX_FAILURES):
        assert not policy.is_hopeless
        seen.append(policy.note_death(SHORT_LIFE_S / 2))
    assert seen == [0.5, 1.0, 2.0, 4.0]
    assert policy.is_hopeless
    for _ in range(10):
        assert policy.note_death(SHORT_LIFE_S) == 0.5
        assert not policy.is_hopeless
    assert policy.note_death(0.0) == 1.0


def test_who_does_not_give_up_waits_for_half_a_minute_each_time() -> None:
    policy = Restarts()
    assert [policy.note_death(0.0) for _ in range(2000)][-1] == MAX_DELAY_S


def test_a_child_that_loads_for_long_and_then_dies_has_not_lived(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is how long it was ready: a model may take minutes to load, and die of its size."""
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=itertools.count(0.0, 2 * SHORT_LIFE_S).__next__))
    source = Supervised(EngineConfig(model="dies"), module="support.fake_child")
    with pytest.raises(EngineError, match="before it was ready"):
        source.open()
    with pytest.raises(EngineError, match=f"It died {MAX_FAILURES} times soon after its start and is given up"):
        source.reopen(threading.Event())
