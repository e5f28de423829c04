"""The request log: which requests have a line, what is in it, and that neither a full disk nor a slow one costs more than lines."""

from __future__ import annotations

import errno
import io
import json
import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pagedcore.config import EngineConfig
from pagedcore.core.events import Admitted, Arrived
from pagedcore.errors import ConfigError
from pagedcore.tracing import writer as writing
from pagedcore.tracing.life import Life
from pagedcore.tracing.request_log import RequestLog
from pagedcore.tracing.tracer import Tracer
from pagedcore.tracing.writer import Writer
from support.observed import make_add, make_finished, make_lookup
from support.traced import TRACE_ID, TRACEPARENT, TracedEngine, live_through_a_preemption, preempted_life, preempted_request

LINE = {
    "time": "1970-01-01T00:00:00.000+00:00",
    "model": "m",
    "engine": "0",
    "request_id": "r",
    "group_id": "r",
    "tenant": "acme",
    "class": "chat",
    "user": "ada",
    "adapter": "library",
    "routing": None,
    "status": "completed",
    "finish_reason": "stop",
    "reject_reason": None,
    "prompt_tokens": 13,
    "completion_tokens": 5,
    "cached_tokens": {"live": 4, "pool": 0, "host": 0},
    "miss": {"cold": 2},
    "first_divergence": None,
    "nearest_cached_prefix": 4,
    "time_in_queue_ms": 1400.0,
    "waiting_reason_ms": {"next_step": 200.0, "max_num_seqs": 300.0, "token_budget": 400.0, "blocks": 900.0},
    "ttft_ms": 1500.0,
    "decode_latency_ms_per_token": 250.0,
    "e2e_ms": 2600.0,
    "kv_cache_pages_allocated": 5,
    "kv_cache_pages_new": 4,
    "preemptions": 1,
    "trace_id": TRACE_ID,
}
"""The whole line of the request of `preempted_request`, by hand."""


def make_log(path: Path, **options: Any) -> RequestLog:
    return RequestLog(str(path), model_name="m", engine="0", wall=lambda: 0.0, **options)


def ended(name: str, *, seconds: float = 1.0, status: str = "completed") -> Life:
    engine = TracedEngine()
    request = make_add(name)
    engine.at(1000.0 + seconds, Arrived(request, 1000.0), make_finished(request, 1000.0 + seconds, status))
    (life,) = engine.history.lives()
    return life


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_every_documented_field_with_its_value(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log")
    log.take([preempted_life(traceparent=TRACEPARENT, user="ada")])
    log.close()
    assert lines_of(tmp_path / "log") == [LINE]


def test_a_line_says_where_the_prompt_left_the_nearest_cached_one(tmp_path: Path) -> None:
    engine = TracedEngine()
    request = make_add("r", num_tokens=13)
    engine.at(1000.0, Arrived(request, 1000.0), Admitted("r", 1000.0, make_lookup("b", "c", pool=1, sibling=2)))
    engine.at(1001.0, make_finished(request, 1001.0, "error"))
    log = make_log(tmp_path / "log")
    log.take(engine.history.lives())
    log.close()
    (line,) = lines_of(tmp_path / "log")
    assert (line["first_divergence"], line["nearest_cached_prefix"], line["miss"]) == (6, 6, {"diverged": 1, "cold": 1})
    assert (line["status"], line["cached_tokens"]) == ("error", {"live": 0, "pool": 4, "host": 0})


def test_a_line_of_a_refused_request_says_why_and_that_nothing_else_happened(tmp_path: Path) -> None:
    engine = TracedEngine()
    request = make_add("big", num_tokens=9)
    engine.at(1000.2, Arrived(request, 1000.2), make_finished(request, 1000.2, "rejected", reject_reason="too_long"))
    log = make_log(tmp_path / "log")
    log.take(engine.history.lives())
    log.close()
    (line,) = lines_of(tmp_path / "log")
    assert (line["status"], line["reject_reason"], line["e2e_ms"]) == ("rejected", "too_long", 200.0)
    assert [line[name] for name in ("ttft_ms", "time_in_queue_ms", "first_divergence", "nearest_cached_prefix")] == [None] * 4
    assert (line["miss"], line["cached_tokens"], line["kv_cache_pages_allocated"]) == ({}, {}, 0)


def test_lines_are_appended_so_that_several_processes_may_share_a_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        log = make_log(tmp_path / "log")
        log.take([ended(name)])
        log.close()
    assert [line["request_id"] for line in lines_of(tmp_path / "log")] == ["a", "b"]


def test_a_dash_is_standard_output_even_one_that_takes_only_text(monkeypatch: pytest.MonkeyPatch) -> None:
    log = RequestLog("-", model_name="m", engine="0")
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    log.take([ended("a"), ended("b")])
    log.close()
    assert [json.loads(line)["request_id"] for line in output.getvalue().splitlines()] == ["a", "b"]
    output.close()
    log.take([ended("c")])
    assert log.num_lost == 1


def test_the_sample_has_its_share_and_keeps_choices_together(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", sample=0.25)
    engine = TracedEngine()
    for number in range(1000):
        request = make_add(f"r{number}")
        engine.at(1000.0, Arrived(request, 1000.0), make_finished(request, 1000.0))
    lives = engine.history.lives()
    kept = [log.keeps(life) for life in lives]
    assert 200 < sum(kept) < 300
    assert kept == [log.keeps(life) for life in lives]
    choice = make_add("r1#3", group="r1", choice_index=3, num_choices=4)
    engine.at(1000.0, Arrived(choice, 1000.0), make_finished(choice, 1000.0))
    assert log.keeps(engine.history.lives()[-1]) == kept[1]
    log.close()


@pytest.mark.parametrize(
    ("seconds", "status", "is_kept"),
    [(0.5, "completed", True), (0.499, "completed", False), (0.0, "error", True), (0.0, "rejected", True), (0.1, "aborted", False)],
)
def test_slow_and_failed_requests_are_always_kept(seconds: float, status: str, is_kept: bool, tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", sample=0.0, slow_ms=500.0)
    assert log.keeps(ended("r", seconds=seconds, status=status)) is is_kept
    log.close()


class FailingFile:
    """Takes `num_bytes` and then is full, until it is given more room."""

    def __init__(self, num_bytes: int) -> None:
        self.room = num_bytes
        self.data = b""

    def write(self, data: bytes | memoryview) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = bytes(data[: self.room])
        self.room -= len(taken)
        self.data += taken
        return len(taken)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing is open."""


def test_a_full_disk_is_said_once_and_later_lines_are_whole_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = make_log(tmp_path / "log")
    log.close()
    log._file = full = FailingFile(100)  # type: ignore[assignment]
    log.take([ended("torn")])
    log.take([ended("lost"), ended("lost too")])
    assert log.num_lost == 3
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "No space left" in caplog.text
    full.room = 10_000
    log.take([ended("kept")])
    torn, line = full.data.splitlines()
    assert (len(torn), json.loads(line)["request_id"]) == (100, "kept")


class SlowTaker:
    """Holds what it is given until it may go on."""

    def __init__(self) -> None:
        self.may_go_on, self.has_begun = threading.Event(), threading.Event()
        self.taken: list[Life] = []
        self.is_closed = False

    def take(self, lives: Sequence[Life]) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(60.0)
        self.taken += lives

    def close(self) -> None:
        self.is_closed = True


def test_a_disk_that_hangs_costs_lines_and_never_blocks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(writing, "MAX_UNWRITTEN", 3)
    taker, life = SlowTaker(), ended("r")
    writer = Writer([taker])
    writer.put(life)
    assert taker.has_begun.wait(60.0)
    for _ in range(10):
        writer.put(life)
    assert writer.num_dropped == 7
    assert len(caplog.records) == 1
    taker.may_go_on.set()
    writer.close()
    assert (len(taker.taken), taker.is_closed) == (4, True)
    assert "7 ended requests were left out" in caplog.text


class CountingTaker:
    """Notes how many came at a time."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def take(self, lives: Sequence[Life]) -> None:
        self.batches.append(len(lives))

    def close(self) -> None:
        """Nothing is open."""


def test_requests_that_end_one_after_another_are_handed_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "GATHER_S", 30.0)
    taker, life = CountingTaker(), ended("r")
    writer = Writer([taker])
    for _ in range(20):
        writer.put(life)
    writer.close()
    assert taker.batches == [20]


class BrokenTaker:
    def take(self, lives: Sequence[Life]) -> None:
        raise RuntimeError("a span processor of the host")

    def close(self) -> None:
        raise RuntimeError("again")


def test_a_provider_that_raises_costs_the_log_nothing(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    writer = Writer([BrokenTaker(), make_log(tmp_path / "log")])
    writer.put(ended("a"))
    writer.close()
    assert [line["request_id"] for line in lines_of(tmp_path / "log")] == ["a"]
    assert [record.message.partition(" What")[0] for record in caplog.records] == ["Ended requests could not be handed on."] * 2
    assert "BrokenTaker.ta" in caplog.text
    assert "BrokenTaker.cl" in caplog.text


def test_a_request_that_no_line_can_hold_costs_no_other_its_line(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """A host that speaks messages with the engine may name anything."""
    log = make_log(tmp_path / "log")
    log.take([ended("a"), preempted_life(name="odd", user=object()), ended("b")])
    log.close()
    assert [line["request_id"] for line in lines_of(tmp_path / "log")] == ["a", "b"]
    assert "has no line" in caplog.text


def test_closing_gives_up_on_a_disk_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    taker = SlowTaker()
    writer = Writer([taker])
    writer.put(ended("r"))
    writer.close(timeout_s=0.01)
    assert "did not take everything" in caplog.text
    taker.may_go_on.set()
    writer._thread.join()


def test_a_tracer_with_a_log_has_written_all_when_it_is_closed(tmp_path: Path) -> None:
    engine = TracedEngine()
    config = EngineConfig(request_log=str(tmp_path / "log"), request_log_sample=0.0, slow_request_ms=2599.0)
    tracer = Tracer(engine.recorder, config, clock=engine.clock)
    live_through_a_preemption(engine, preempted_request())
    quick = make_add("quick", arrival_s=1002.9)
    engine.at(1003.0, Arrived(quick, 1003.0), make_finished(quick, 1003.0))
    tracer.close()
    assert [line["request_id"] for line in lines_of(tmp_path / "log")] == ["r"]


def test_a_log_that_cannot_be_opened_is_a_wrong_setting(tmp_path: Path) -> None:
    config = EngineConfig(request_log=str(tmp_path / "no" / "folder" / "log"))
    with pytest.raises(ConfigError, match=r"request_log is .* cannot be opened"):
        Tracer(TracedEngine().recorder, config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"request_log": ""}, "request_log is '' and must be text"),
        ({"request_log": "-", "request_log_sample": 1.5}, "request_log_sample is 1.5 and must be a number of at least 0 and at most 1"),
        ({"request_log": "-", "request_log_sample": float("nan")}, "request_log_sample is nan"),
        ({"request_log": "-", "slow_request_ms": -1}, "slow_request_ms is -1 and must be None or a number"),
        ({"request_log_sample": 0.5}, "set request_log"),
        ({"slow_request_ms": 100}, "set request_log"),
        ({"otlp_endpoint": "localhost:4317"}, "otlp_endpoint is 'localhost:4317' and must begin with http"),
        ({"otlp_endpoint": 7}, "otlp_endpoint is 7 and must be text"),
    ],
)
def test_settings_that_would_do_nothing_or_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_nothing_is_written_and_no_thread_starts_without_a_log_and_a_provider(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    engine = TracedEngine()
    live_through_a_preemption(engine, preempted_request())
    assert engine.tracer._writer is None
    assert not [thread for thread in threading.enumerate() if thread.name == "pagedcore-request-log"]
    engine.tracer.close()
    assert not caplog.records
