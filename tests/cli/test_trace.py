"""`pagedcore trace`, against a server that answers in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pagedcore import cli
from support.traced import TracedEngine, live_through_a_preemption, preempted_request

POLL_S = 0.02
"""How often the server looks whether it is to end."""


class Server(ThreadingHTTPServer):
    """Answers /v1/trace with `status` and `body`, and remembers the keys that it was given."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        engine = TracedEngine()
        live_through_a_preemption(engine, preempted_request())
        self.body = json.dumps(engine.tracer.chrome_trace())
        self.asked: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        body = self.server.body.encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Tests are quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["trace", *arguments])
    return int(ended.value.code or 0)


def test_the_trace_of_a_server_is_written_as_it_came(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert run(server.url + "/v1/", "-o", str(path), "--api-key", "k") == 0
    assert json.loads(path.read_text()) == json.loads(server.body)
    assert server.asked == [("/v1/trace", "Bearer k")]
    assert f"{path}: 1 requests, 2 steps." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "body", "code", "message"),
    [
        (401, "{}", 2, "wants an API key"),
        (403, "{}", 2, "belongs to a tenant"),
        (404, "{}", 1, "allow_operator_routes=False"),
        (500, "{}", 1, "answered HTTP 500"),
        (200, "<html>", 1, "is a pagedcore server there?"),
        (200, "[]", 1, "gave no trace"),
    ],
)
def test_whatever_else_answers_is_one_sentence(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int, body: str, code: int, message: str
) -> None:
    server.status, server.body = status, body
    assert run(server.url, "-o", str(tmp_path / "out.json")) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_no_server_and_no_url_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("http://127.0.0.1:9", "-o", str(tmp_path / "out.json")) == 1
    assert "gave no answer" in capsys.readouterr().err
    assert run("ftp://here", "-o", str(tmp_path / "out.json")) == 2
    assert "must be that of a server" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server.url, "-o", str(tmp_path / "no" / "out.json")) == 2
    assert "choose another file with -o" in capsys.readouterr().err
