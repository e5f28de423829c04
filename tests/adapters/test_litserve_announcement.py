"""A LitServe server that is ready says where it is, once."""

from __future__ import annotations

from typing import Any

import pytest

from pagedcore import EngineConfig
from pagedcore.client import ModelInfo
from pagedcore.openai import ServerSettings
from pagedcore_adapters._litserve_hooks import HookedServer
from pagedcore_adapters._litserve_messages import WorkerFacts
from pagedcore_adapters._litserve_placement import Placement
from pagedcore_adapters._litserve_server import PagedServer, ServerOptions
from pagedcore_adapters._litserve_worker_api import WorkerAPI
from support.served import free_port


def ready_server(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> PagedServer:
    """Its `run` is ready at once, and over."""
    server = PagedServer(WorkerAPI(EngineConfig()), ServerSettings(**settings), Placement("cpu", 1), ServerOptions())
    info = ModelInfo(model_names=("small", "other"), max_model_len=64, created_s=0, vocab_size=8)
    server.lit_api.facts = {0: WorkerFacts(plan=None, info=info)}  # type: ignore[arg-type]
    monkeypatch.setattr(HookedServer, "run", lambda self, **options: self.on_serving())
    return server


def test_one_line_says_where_the_server_and_its_pages_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    ready_server(monkeypatch).run(host="127.0.0.1", port=port)
    base = f"http://127.0.0.1:{port}"
    assert capsys.readouterr().out == f"pagedcore serves small at {base}/v1. Live page: {base}/ui, metrics: {base}/metrics. Stop: Ctrl-C\n"


def test_pages_that_are_not_served_are_not_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    ready_server(monkeypatch, allow_operator_routes=False).run(host="127.0.0.1", port=port)
    assert capsys.readouterr().out == f"pagedcore serves small at http://127.0.0.1:{port}/v1. Stop: Ctrl-C\n"


def test_who_has_words_of_their_own_is_the_only_one_to_speak(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ready_server(monkeypatch).run(host="127.0.0.1", port=free_port(), on_ready=lambda: print("up"))
    assert capsys.readouterr().out == "up\n"
