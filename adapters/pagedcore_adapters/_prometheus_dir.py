"""The folder through which several processes show one /metrics, and the name of each engine in it."""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from pagedcore import EngineConfig
from pagedcore.errors import ConfigError
from pagedcore.observe.exposition import multiprocess_text
from pagedcore_adapters._killed_processes import settle_process

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

logger = logging.getLogger(__name__)

_FILE = re.compile(r"(?:.+_(?=\d+\.db)|pagedcore_)(?P<pid>\d+)\.(db|start|new)")
"""What a process leaves in the folder: its numbers, and when it began, by which it differs from a later one of its id."""


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


def forget_process(pid: int) -> int:
    """A process has ended: its gauges are nobody's, its counters stay in the sums, and the requests that it took with it are failures
    among them. Returns how many these are."""
    return settle_process(pid, os.environ[VARIABLE])


def forget_ended_processes() -> None:
    """The same for all processes that have ended, where one that starts in their stead is the first to know: it says so in the folder."""
    folder = os.environ.get(VARIABLE)
    for path in Path(folder).glob("counter_*.db") if folder else ():
        match = _FILE.fullmatch(path.name)
        if match is not None and _has_ended(int(match["pid"]), path.parent):
            num_lost = forget_process(int(match["pid"]))
            if num_lost:
                logger.error("Process %s has ended and took %d requests with it; they are counted as failed.", match["pid"], num_lost)
    if folder:
        _say_start(Path(folder))


def _say_start(folder: Path) -> None:
    """Write when this process began, whole or not at all: others read it at any moment."""
    started, told = _start_of(os.getpid()), _start_file(os.getpid(), folder)
    being_written = told.with_suffix(".new")
    if started is not None:
        try:
            being_written.write_text(started, encoding="utf-8")
            being_written.replace(told)
        except OSError:  # a full disk: without it, this process counts as running for as long as any has its id
            for path in (being_written, told):
                with suppress(OSError):
                    path.unlink(missing_ok=True)


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = [(path, int(match["pid"])) for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))]
        for path in [path for path, pid in files if _has_ended(pid, folder)]:
            if path.suffix != ".db" or b"pagedcore_" in path.read_bytes():
                path.unlink(missing_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"{VARIABLE} is {str(folder)!r}, which cannot be used: {error}. Name a folder on a local disk, or unset it."
        ) from error


def _has_ended(pid: int, folder: Path) -> bool:
    """Whether the process that wrote files there has: no other one has its id, or only a later one. Our own files may be open."""
    if pid == os.getpid():
        return False
    if not _is_running(pid):
        return True
    try:
        said = _start_file(pid, folder).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return said.isdigit() and _start_of(pid) not in (None, said)


def _start_file(pid: int, folder: Path) -> Path:
    return folder / f"pagedcore_{pid}.start"


def _is_running(pid: int) -> bool:
    if sys.platform == "win32":
        return True  # signal 0 would end it there
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """It has ended, and its parent has not asked how."""
    return _stat(pid)[:1] == ["Z"]


def _start_of(pid: int) -> str | None:
    """When a process began, in clock ticks since the machine did; None where nobody says."""
    return next(iter(_stat(pid)[19:]), None)


def _stat(pid: int) -> list[str]:
    """What Linux says of a process, from its state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:  # there is no such folder here
        return []
