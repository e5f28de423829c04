"""The folder through which several processes show one /metrics."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def ensure_multiprocess_dir() -> str:
    """The folder of `PROMETHEUS_MULTIPROC_DIR`; without one a new one, inherited by child processes, gone at exit.

    prometheus_client reads the variable when it is imported, so call this before any worker starts.
    """
    given = os.environ.get(VARIABLE)
    if given:
        Path(given).mkdir(parents=True, exist_ok=True)
        return given
    folder = tempfile.mkdtemp(prefix="pagedcore-metrics-")
    os.environ[VARIABLE] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def multiprocess_metrics() -> tuple[bytes, str]:
    """The series of all processes that write to the folder, and their content type."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=os.environ[VARIABLE])  # type: ignore[no-untyped-call]
    return generate_latest(registry), CONTENT_TYPE_LATEST
