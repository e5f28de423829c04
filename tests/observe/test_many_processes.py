"""A multi-process set-up: engines write in their own processes, another process is scraped."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from support.observed import Engine, make_lookup, sample_key, samples_of

TESTS = Path(__file__).parents[1]

WRITER = """
import sys
from support.observed import Engine, make_lookup
from prometheus_client import REGISTRY
from pagedcore.observe.prometheus import is_multiprocess
assert is_multiprocess()
engine = Engine(registry=REGISTRY, engine=sys.argv[1])
for i in range(int(sys.argv[2])):
    engine.serve(f"r{i}", make_lookup("a", live=1, tail=0))
engine.step(num_running=0)  # idle: exported without a scrape in this process
assert engine.recorder.export_fault is None
"""

READER = """
import sys
from pagedcore.observe.exposition import metrics_text
sys.stdout.buffer.write(metrics_text()[0])
"""

SURVIVOR = """
from support.observed import Engine, make_lookup
from pagedcore.observe.exposition import metrics_text
engine = Engine()
engine.serve("r1", make_lookup("a"))
print(engine.recorder.stats().page_lookups, engine.recorder.export_fault is not None)
print(metrics_text(engine.registry)[0].decode())
"""


def run(code: str, directory: Path, *args: str) -> str:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *args], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_another_process_is_scraped_with_the_same_series_as_a_plain_one(tmp_path: Path) -> None:
    run(WRITER, tmp_path, "0", "3")
    shown = samples_of(run(READER, tmp_path))
    plain = Engine()
    for i in range(3):
        plain.serve(f"r{i}", make_lookup("a", live=1, tail=0))
    plain.step(num_running=0)
    expected = plain.samples()
    assert {k: str(v) for k, v in shown.items()} == {k: str(v) for k, v in expected.items()}


def test_two_workers_keep_their_own_series(tmp_path: Path) -> None:
    for name, num in (("1", "2"), ("2", "5")):
        run(WRITER, tmp_path, name, num)
    shown = samples_of(run(READER, tmp_path))
    for name, lookups in (("1", 4), ("2", 10)):
        labels = {"model_name": "m", "engine": name}
        assert shown[sample_key("pagedcore_page_lookups_total", labels)] == lookups
        assert shown[sample_key("pagedcore_cache_hit_rate", labels)] == 0.5


def test_the_last_line_with_cache_hit_rate_is_the_prefix_hit_rate(tmp_path: Path) -> None:
    run(WRITER, tmp_path, "0", "1")
    lines = [line for line in run(READER, tmp_path).splitlines() if "cache_hit_rate" in line]
    assert float(lines[-1].split()[-1]) == 0.5


def test_a_directory_that_is_not_there_costs_the_metrics_and_nothing_else(tmp_path: Path) -> None:
    first, text = run(SURVIVOR, tmp_path / "missing").split("\n", 1)
    assert first == "1 True"
    assert text.startswith("# pagedcore: metrics cannot be read:")
    assert "is not a directory" in text
    assert samples_of(text) == {}


@pytest.mark.parametrize("content", [b"", struct.pack("iii", 64, 0, 1000) + bytes(52)], ids=["just made", "damaged"])
def test_a_file_that_cannot_be_read_gives_a_comment_not_a_failure(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "counter_1.db").write_bytes(content)
    assert run(READER, tmp_path).startswith("# pagedcore: metrics cannot be read:")
