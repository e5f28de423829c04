"""A hub on 127.0.0.1: the few endpoints through which huggingface_hub finds and downloads a repository."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_REVISION = re.compile(r"/api/models/(?P<repo>.+)/revision/(?P<revision>[^/]+)")
_TREE = re.compile(r"/api/models/(?P<repo>.+)/tree/(?P<revision>[^/]+)/?")
_FILE = re.compile(r"/(?P<repo>.+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class StubRepo:
    """One repository: the files of each revision; `token` is who may read it."""

    revisions: dict[str, dict[str, bytes]]
    token: str | None = None
    is_gated: bool = False

    def commit(self, revision: str) -> str | None:
        """The commit of a branch or of itself."""
        for name in self.revisions:
            digest = commit_of(name)
            if revision in (name, digest):
                return digest
        return None

    def files(self, revision: str) -> dict[str, bytes]:
        return next(files for name, files in self.revisions.items() if revision in (name, commit_of(name)))


def commit_of(revision: str) -> str:
    """The made-up commit hash of a branch."""
    return hashlib.sha1(revision.encode()).hexdigest()


@dataclass
class StubHub:
    """A running hub; `requests` are the method and path of everything that was asked."""

    url: str
    repos: dict[str, StubRepo]
    requests: list[str] = field(default_factory=list)

    @property
    def downloads(self) -> list[str]:
        """Names of the files whose content was fetched."""
        return sorted(request.rsplit("/", 1)[1] for request in self.requests if request.startswith("GET") and "/resolve/" in request)


@contextmanager
def running_hub(repos: dict[str, StubRepo]) -> Iterator[StubHub]:
    """Serve `repos` on a free port until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = StubHub(f"http://127.0.0.1:{server.server_address[1]}", repos)
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *args: object) -> None:
        """Stay silent."""

    def _answer(self) -> None:
        hub: StubHub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        for pattern, answer in ((_REVISION, self._revision), (_TREE, self._tree), (_FILE, self._file)):
            match = pattern.fullmatch(path)
            if match:
                repo = self._readable(hub, match["repo"])
                if repo is not None:
                    answer(match["repo"], repo, match.groupdict())
                return
        self._send(404, {"error": f"no such endpoint: {path}"})

    def _readable(self, hub: StubHub, name: str) -> StubRepo | None:
        """The repository, if it is there and the token may read it; else the refusal is sent."""
        repo = hub.repos.get(name)
        is_allowed = repo is not None and (repo.token is None or self.headers.get("Authorization") == f"Bearer {repo.token}")
        if repo is not None and is_allowed:
            return repo
        if repo is not None and repo.is_gated:
            self._send(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        else:  # the real hub does not tell a private repository from a missing one either
            self._send(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        return None

    def _revision(self, name: str, repo: StubRepo, asked: dict[str, str]) -> None:
        commit = repo.commit(asked["revision"])
        if commit is None:
            self._send(404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [{"rfilename": path} for path in repo.files(asked["revision"])]
        self._send(200, {"id": name, "modelId": name, "sha": commit, "private": False, "tags": [], "siblings": siblings})

    def _tree(self, name: str, repo: StubRepo, asked: dict[str, str]) -> None:
        files = repo.files(asked["revision"])
        self._send(200, [{"type": "file", "path": path, "size": len(data), "oid": _etag(data)} for path, data in files.items()])

    def _file(self, name: str, repo: StubRepo, asked: dict[str, str]) -> None:
        data = repo.files(asked["revision"]).get(asked["path"])
        if data is None:
            self._send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        commit = repo.commit(asked["revision"]) or ""
        self._send(200, data, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"})

    def _send(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if isinstance(body, bytes) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
