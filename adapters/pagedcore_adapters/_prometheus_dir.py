"""The folder through which several processes show one /metrics, and the name of each engine in it."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from pagedcore import EngineConfig
from pagedcore.errors import ConfigError
from pagedcore.observe.exposition import multiprocess_text

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

_FILE = re.compile(r".+_(?P<pid>\d+)\.db")
"""What a process leaves in the folder."""


def ensure_multiprocess_dir() -> str:
    """The folder of `PROMETHEUS_MULTIPROC_DIR`, without what ended processes of pagedcore left in it; else a new one, gone at exit.

    prometheus_client reads the variable when it is imported, and child processes inherit it, so call this before any worker
    starts. Raises `ConfigError` for a folder that cannot be used.
    """
    given = os.environ.get(VARIABLE)
    if given:
        _prepare(Path(given))
        return given
    folder = tempfile.mkdtemp(prefix="pagedcore-metrics-")
    os.environ[VARIABLE] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def multiprocess_metrics() -> tuple[bytes, str]:
    """The series of all processes that write to the folder, and their content type."""
    return multiprocess_text(os.environ[VARIABLE])


def engine_label(config: EngineConfig, worker_id: int) -> str:
    """The `engine` label of a worker: its number, or the configured name, which later workers get with their number added."""
    if config.metrics_instance == EngineConfig().metrics_instance:
        return str(worker_id)
    return config.metrics_instance if worker_id == 0 else f"{config.metrics_instance}-{worker_id}"


def forget_process(pid: int | None) -> None:
    """A process has ended: its gauges are nobody's, its counters stay in the sums."""
    from prometheus_client.multiprocess import mark_process_dead

    mark_process_dead(pid, os.environ[VARIABLE])  # type: ignore[no-untyped-call]


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if (match := _FILE.fullmatch(path.name)) and not _is_running(int(match["pid"])) and b"pagedcore_" in path.read_bytes():
                path.unlink(missing_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"{VARIABLE} is {str(folder)!r}, which cannot be used: {error}. Name a folder on a local disk, or unset it."
        ) from error


def _is_running(pid: int) -> bool:
    if sys.platform == "win32":
        return True  # signal 0 would end it there
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
