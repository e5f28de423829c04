"""Server processes for tests: started on a free port, waited for, and ended with everything that they started."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from support.repository import ROOT

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.05
_MARK = "PAGEDCORE_TEST_SERVER"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Poll until the condition holds. Fails, naming `what`, when time runs out."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_S)


def post_and_leave(
    url: str, body: Mapping[str, object], has_arrived: Callable[[], object], headers: Mapping[str, str] | None = None
) -> None:
    """A client that stops waiting for its reply, once `has_arrived` says that its request is at work."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.netloc, timeout=60)
    try:
        connection.request("POST", where.path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        wait_until(has_arrived, 60, "the request at work")
    finally:
        connection.close()


@dataclass(frozen=True)
class Served:
    """One running server. `mark` is in the environment of each of its processes."""

    url: str
    process: subprocess.Popen[bytes]
    mark: str
    log: Path

    def pids(self) -> dict[int, str]:
        """Its living processes: pid -> command line."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and _has_mark(folder, self.mark):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return found

    def loads(self, library: str) -> set[int]:
        """Pids of its processes that have mapped a shared library of this name."""
        return {pid for pid in self.pids() if library in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")}

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def is_ready(self, path: str) -> bool:
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.tail()}"
        try:
            return self.get(path).status_code == 200
        except httpx.TransportError:
            return False

    def terminate(self) -> int:
        """SIGTERM to the main process only; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def tail(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-6000:]


@contextmanager
def serve(
    arguments: Sequence[str], log: Path, *, port: int, ready_path: str | None = "/ready", env: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Run `python *arguments` until the block ends. It must listen on `port` and answer 200 on `ready_path` when it is ready
    (None: do not wait). Whatever it started is gone afterwards."""
    mark = uuid.uuid4().hex
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "adapters", "tests"))
    full_env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(env or {}), _MARK: mark}
    full_env.pop("PROMETHEUS_MULTIPROC_DIR", None)
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT, env=full_env, cwd=log.parent)
    served = Served(f"http://127.0.0.1:{port}", process, mark, log)
    try:
        if ready_path is not None:
            wait_until(lambda: served.is_ready(ready_path), START_TIMEOUT_S, f"a ready server; its log is {log}")
        yield served
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        _kill_all(served)


def _has_mark(folder: Path, mark: str) -> bool:
    try:
        environ = (folder / "environ").read_bytes()
        state = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return f"{_MARK}={mark}".encode() in environ.split(b"\0") and state != "Z"


def _kill_all(served: Served) -> None:
    for pid in served.pids():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
