"""How many threads torch computes with on a CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

CGROUP_QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


def num_cpu_threads(environment: Mapping[str, str] | None = None, quota_file: Path = CGROUP_QUOTA_FILE) -> int | None:
    """Threads that a container's CPU quota pays for, if they are fewer than the cores it sees; None to leave torch's choice.

    OMP_NUM_THREADS, if set, is the user's choice and stands.
    """
    environment = os.environ if environment is None else environment
    if "OMP_NUM_THREADS" in environment:
        return None
    quota = _quota_cpus(quota_file)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return None if quota is None or quota >= cores else max(1, math.ceil(quota))


def _quota_cpus(quota_file: Path) -> float | None:
    """CPUs of a cgroup v2 quota, `max 100000` or `<microseconds> <period>`; None without one."""
    try:
        quota, period = quota_file.read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
