"""Tests' ways to a LitServe server of fake engines (`fake_litserve_app.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx

from support.repository import ROOT
from support.served import Served, free_port, serve

SCRIPT = str(ROOT / "tests" / "support" / "fake_litserve_app.py")
ENDLESS = 10**9


def serve_fake(
    tmp_path: Path, *, workers: int = 1, api_servers: int = 1, kind: str = "good", drain_timeout_s: float = 30.0
) -> AbstractContextManager[Served]:
    """A server of this kind; ready when all its workers are."""
    port = free_port()
    arguments = [SCRIPT, str(port), str(workers), str(api_servers), kind, str(drain_timeout_s)]
    return serve(arguments, tmp_path / "server.log", port=port)


def body(*, max_tokens: int, stream: bool = False, content: str = "hi") -> dict[str, object]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, "stream": stream}


def ask(served: Served, max_tokens: int, **options: object) -> httpx.Response:
    return httpx.post(served.url + "/v1/chat/completions", json=body(max_tokens=max_tokens, **options), timeout=60)  # type: ignore[arg-type]


def stream_lines(served: Served, max_tokens: int, request_id: str = "", content: str = "hi") -> Iterator[str]:
    """Closing it is a client that leaves."""
    content_body = body(max_tokens=max_tokens, stream=True, content=content)
    headers = {"X-Request-Id": request_id} if request_id else {}
    with httpx.stream("POST", served.url + "/v1/chat/completions", json=content_body, headers=headers, timeout=60) as reply:
        yield from reply.iter_lines()


def is_ready(served: Served) -> bool:
    try:
        return served.get("/ready").status_code == 200
    except httpx.TransportError:
        return False  # stopped already


def worker_pids(served: Served) -> list[int]:
    return [pid for pid, command in served.pids().items() if "spawn_main" in command]


def messages(served: Served, kind: str) -> list[tuple[int, str]]:
    """(worker, request id) of each message of a kind that came to a worker, in order; (worker, pid) for "Process"."""
    log = served.log.read_text(encoding="utf-8", errors="replace")
    return [(int(worker_id), request_id) for worker_id, request_id in re.findall(rf"worker (\d): {kind} (\S+)", log)]


def worker_pid(served: Served, worker_id: int) -> int:
    """The process of a worker in its present life."""
    return [int(pid) for one, pid in messages(served, "Process") if one == worker_id][-1]
