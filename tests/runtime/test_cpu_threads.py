"""A CPU engine computes with the cores that it is paid for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagedcore.cpu_threads import num_cpu_threads

MANY = 10_000


@pytest.mark.parametrize(
    ("content", "expected"),
    [("max 100000\n", None), ("50000 100000\n", 1), (f"{MANY * 100000} 100000\n", None), ("nonsense", None)],
)
def test_a_quota_below_the_cores_sets_the_threads(tmp_path: Path, content: str, expected: int | None) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(content)
    assert num_cpu_threads({}, quota) == expected


def test_half_a_core_above_a_whole_one_is_a_thread_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("150000 100000")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert num_cpu_threads({}, quota) == 2


def test_no_quota_file_and_the_users_own_number_leave_torch_alone(tmp_path: Path) -> None:
    assert num_cpu_threads({}, tmp_path / "missing") is None
    quota = tmp_path / "cpu.max"
    quota.write_text("50000 100000")
    assert num_cpu_threads({"OMP_NUM_THREADS": "4"}, quota) is None
