"""A killed process leaves a folder in which each request that it had received has ended, once, whoever looks and however often."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedcore.observe.exposition import multiprocess_text
from pagedcore_adapters import _prometheus_dir
from pagedcore_adapters._killed_processes import settle_process
from pagedcore_adapters._prometheus_dir import VARIABLE, ensure_multiprocess_dir, forget_ended_processes, forget_process
from support.repository import ROOT
from support.served import wait_until

WORKER = """
import os, sys, time
sys.path[:0] = {paths!r}
from pagedcore.metrics_compat.ledgers import ledger_for
from pagedcore.observe.recorder import Recorder
from pagedcore.async_engine import AsyncEngine
from pagedcore.client import ModelInfo
from pagedcore.core.scheduler import Scheduler
from pagedcore.engine_build import recorder_info, scheduler_limits
from pagedcore.engine_loop import EngineLoop, EngineParts
from support.core_builders import make_request
from support.engine_builder import GatedRunner, make_plan
from support.fake_runner import VOCAB_SIZE, FakeRunner
from pagedcore_adapters._prometheus_dir import forget_ended_processes

{begin}
plan = make_plan(metrics_instance=sys.argv[1], max_num_seqs=2)
runner = GatedRunner(FakeRunner(plan.num_blocks, plan.block_size))
runner.gate.set()
info = ModelInfo(model_names=("fake",), max_model_len=plan.max_model_len, created_s=0, vocab_size=VOCAB_SIZE)
recorder = Recorder(recorder_info(plan), ledger=ledger_for(sys.argv[2] or None))
loop = EngineLoop(EngineParts(plan=plan, info=info, scheduler=Scheduler(scheduler_limits(plan)), runner=runner, recorder=recorder))
engine = AsyncEngine(loop=loop)

def ask(name, **fields):
    told = []
    loop.submit(make_request(name, list(range(20)), max_tokens=3, **fields), told.extend)
    return told

def wait(told):
    while not any(update.finish_reason for update in told):
        time.sleep(0.001)

wait(ask("done"))
wait(ask("of a tenant", tenant="t", adapter="litserve"))
wait(ask("refused", tenant="t", request_class="c", num_choices=1, priority=3))
runner.waiting.clear()
runner.gate.clear()
for number in range({num_open}):
    ask(f"open {{number}}", tenant="t" if number % 2 else None, adapter="bentoml" if number == 3 else "litserve", request_class="c")
runner.waiting.wait(60)
for index in range(2):
    name = f"n#{{index}}" if index else "n"
    ask(name, group_id="n", choice_index=index, num_choices=2)
{end}
"""
KILLED = "os.kill(os.getpid(), 9)"
CLOSED = "runner.gate.set(); engine.close_sync()"
PATHS = [str(ROOT / folder) for folder in (".", "kernels", "adapters", "tests")]


def start_work(
    folder: Path, *, engine: str = "0", compat: str = "", num_open: int = 4, begin: str = "", end: str = KILLED
) -> subprocess.Popen[bytes]:
    code = WORKER.format(paths=PATHS, num_open=num_open, begin=begin, end=end)
    env = {**os.environ, VARIABLE: str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code, engine, compat], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def work(folder: Path, *, end: str = KILLED, **options: Any) -> int:
    """A worker's life; returns its pid."""
    with start_work(folder, end=end, **options) as process:
        assert process.wait(120) == (-9 if end == KILLED else 0)
    return process.pid


def total(folder: Path, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(multiprocess_text(str(folder))[0].decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def check_balance(folder: Path) -> None:
    """Received is ended, under the labels of each, and each prompt that was looked up has a fate."""
    assert total(folder, "pagedcore_received_requests_total") == total(folder, "pagedcore_requests_total")
    for labels in ({"tenant": "t"}, {"class": "c"}, {"adapter": "litserve"}, {"adapter": "bentoml"}, {"adapter": "library"}):
        received, ended = (total(folder, f"pagedcore_{name}_total", **labels) for name in ("received_requests", "requests"))
        assert received == ended, labels
    looked_up = total(folder, "pagedcore_prefix_cache_queries_tokens_total")
    told = ("prefix_cache_hit_tokens", "computed_prompt_tokens", "abandoned_prompt_tokens")
    assert looked_up == sum(total(folder, f"pagedcore_{name}_total") for name in told) > 0


def test_what_a_killed_process_had_open_is_counted_as_failed_under_its_own_labels(tmp_path: Path) -> None:
    pid = work(tmp_path)
    assert total(tmp_path, "pagedcore_received_requests_total") == 8
    assert total(tmp_path, "pagedcore_requests_total") == 3
    assert settle_process(pid, tmp_path) == 5
    check_balance(tmp_path)
    statuses = {status: total(tmp_path, "pagedcore_requests_total", status=status) for status in ("completed", "rejected", "error")}
    assert statuses == {"completed": 2, "rejected": 1, "error": 5}
    assert total(tmp_path, "pagedcore_requests_total", status="error", tenant="t", **{"class": "c"}) == 2
    assert total(tmp_path, "pagedcore_requests_total", status="error", adapter="bentoml") == 1
    assert total(tmp_path, "pagedcore_requests_total", engine="0") == 8
    assert not list(tmp_path.glob("gauge_*"))


def test_it_is_counted_once_however_often_and_by_however_many_it_is_looked_at(tmp_path: Path) -> None:
    pid = work(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: settle_process(pid, tmp_path), range(8)))
    assert sorted(found) == [0] * 7 + [5]
    assert total(tmp_path, "pagedcore_requests_total", status="error") == 5


def test_gauges_that_another_process_removes_at_the_same_time_are_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("liveall", "livesum"):
        (tmp_path / f"gauge_{mode}_1.db").touch()
    remove = os.remove

    def second_to_remove(path: str) -> None:
        remove(path)
        monkeypatch.setattr(os, "remove", remove)
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "remove", second_to_remove)
    assert settle_process(1, tmp_path) == 0
    assert not list(tmp_path.iterdir())


def test_a_process_that_ended_in_order_leaves_nothing_to_settle(tmp_path: Path) -> None:
    pid = work(tmp_path, end=CLOSED)
    check_balance(tmp_path)
    assert total(tmp_path, "pagedcore_received_requests_total") == 8
    assert settle_process(pid, tmp_path) == 0
    check_balance(tmp_path)


def test_the_names_of_vllm_say_the_same(tmp_path: Path) -> None:
    pid = work(tmp_path, compat="vllm")
    before = total(tmp_path, "vllm:request_success_total", finished_reason="error")
    settle_process(pid, tmp_path)
    assert total(tmp_path, "vllm:request_success_total", finished_reason="error") == before + 5


def test_two_engines_of_two_processes_keep_their_own(tmp_path: Path) -> None:
    first, second = work(tmp_path, engine="0"), work(tmp_path, engine="1", num_open=2)
    assert (settle_process(first, tmp_path), settle_process(second, tmp_path)) == (5, 3)
    assert total(tmp_path, "pagedcore_requests_total", engine="1", status="error") == 3


def test_who_starts_in_the_stead_of_others_settles_for_those_that_ended_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    pid = work(tmp_path)
    monkeypatch.setattr(_prometheus_dir, "_is_running", lambda one: one == pid)
    forget_ended_processes()
    assert total(tmp_path, "pagedcore_requests_total", status="error") == 0
    monkeypatch.undo()
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    forget_ended_processes()
    assert total(tmp_path, "pagedcore_requests_total", status="error") == 5
    assert forget_process(pid) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("has_noted_start", [True, False])
def test_a_stranger_with_the_id_of_one_that_ended_does_not_stand_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_noted_start: bool
) -> None:
    """Without its start, as an older version leaves it, nobody can tell: it is taken for the one that goes on."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    pid = work(tmp_path, begin="forget_ended_processes()" if has_noted_start else "")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        for path in list(tmp_path.iterdir()):  # as if the system had given it this very id
            path.rename(path.with_name(path.name.replace(str(pid), str(stranger.pid))))
        forget_ended_processes()
        assert total(tmp_path, "pagedcore_requests_total", status="error") == (5 if has_noted_start else 0)
        assert bool(list(tmp_path.glob("gauge_*.db"))) is not has_noted_start
        forget_ended_processes()
        assert total(tmp_path, "pagedcore_requests_total", status="error") == (5 if has_noted_start else 0)
        ensure_multiprocess_dir()
        assert bool(list(tmp_path.glob(f"*_{stranger.pid}.*"))) is not has_noted_start, "a new server begins without what it left"
        stranger.communicate(b"\n")


@contextmanager
def going_on(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has said when it began and has requests open; it is killed at the block's end."""
    end = "print('here', flush=True); input(); " + KILLED
    with start_work(folder, begin="forget_ended_processes()", end=end) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"here\n"
        yield process
        process.stdin.write(b"\n")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_one_that_goes_on_keeps_its_numbers_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with going_on(tmp_path):
        forget_ended_processes()
        assert total(tmp_path, "pagedcore_requests_total", status="error") == 0
        ensure_multiprocess_dir()
        assert total(tmp_path, "pagedcore_received_requests_total") == 8
    forget_ended_processes()
    assert total(tmp_path, "pagedcore_requests_total", status="error") == 5


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("said", [b"", b"\xff", b"12 34"])
def test_one_whose_start_cannot_be_read_counts_as_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with going_on(tmp_path) as process:
        _prometheus_dir._start_file(process.pid, tmp_path).write_bytes(said)
        forget_ended_processes()
        assert total(tmp_path, "pagedcore_requests_total", status="error") == 0


def test_a_start_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_disk(path: Path, text: str, **_: object) -> int:
        path.touch()
        raise OSError("no space left on device")

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    _prometheus_dir._start_file(os.getpid(), tmp_path).write_text("1")  # of one that had this id before
    monkeypatch.setattr(Path, "write_text", fill_disk)
    forget_ended_processes()
    assert list(tmp_path.iterdir()) == []


def test_files_of_the_hosts_own_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    names = ["report_4000123.new", "x_4000124.start", "counter_4000125.db"]
    for name in names:
        (tmp_path / name).write_text("of the host")
    ensure_multiprocess_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_who_starts_leaves_its_own_numbers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file may be open already, for numbers of its host's; what one of the same id left there is settled with it."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    pid = work(tmp_path, begin="forget_ended_processes()")
    for path in list(tmp_path.iterdir()):
        path.rename(path.with_name(path.name.replace(str(pid), str(os.getpid()))))
    forget_ended_processes()
    assert total(tmp_path, "pagedcore_requests_total", status="error") == 0
    assert settle_process(os.getpid(), tmp_path) == 5


def test_without_a_folder_there_is_nothing_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    forget_ended_processes()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_one_that_has_ended_and_whose_parent_has_not_asked_is_over() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as child:
        wait_until(lambda: not _prometheus_dir._is_running(child.pid), 60, "its end is seen")
        assert child.returncode is None


@pytest.mark.parametrize("content", [b"\1\0", b"\xff" * 100, None], ids=["just made", "damaged", "never made"])
def test_a_file_that_cannot_be_read_costs_nothing_else(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "counter_1.db").write_bytes(content)
    assert settle_process(1, tmp_path) == 0
