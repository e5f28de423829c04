"""A `pagedcore serve` of our own to measure: started on a free port, waited for, ended."""

from __future__ import annotations

import dataclasses
import importlib.util
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagedcore.config import EngineConfig
from pagedcore.errors import EngineError, MissingExtraError
from pagedcore.extras import pip_command

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.2
SHOWN_LINES = 12


@contextmanager
def local_server(config: EngineConfig) -> Iterator[str]:
    """Its URL, from when it is ready. Raises `MissingExtraError` without LitServe, `EngineError` when it ends instead of serving."""
    if importlib.util.find_spec("litserve") is None:
        raise MissingExtraError(
            f"bench serve starts a server with LitServe, which is not installed: {pip_command('litserve')}, or give --url"
        )
    url = f"http://127.0.0.1:{_free_port()}"
    command = [sys.executable, "-m", "pagedcore", "serve", "--port", url.rpartition(":")[2], *engine_arguments(config)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(url, process, log)
            yield url
        finally:
            _stop(process)


def engine_arguments(config: EngineConfig) -> list[str]:
    """The flags that say what differs from the default."""
    arguments = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            arguments += _arguments(field.name.replace("_", "-"), value)
    return arguments


def _arguments(name: str, value: Any) -> list[str]:
    if isinstance(value, bool) and name != "overlap":
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, tuple):
        return [part for one in value for part in (f"--{name}", str(one))]
    return [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not _is_ready(url):
        if process.poll() is not None:
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:])
            raise EngineError(f"The server ended with {process.returncode} before it was ready. Its last lines:\n{tail}")
        if time.monotonic() > deadline_s:
            raise EngineError(f"The server was not ready within {START_TIMEOUT_S:g} s.")
        time.sleep(POLL_S)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
