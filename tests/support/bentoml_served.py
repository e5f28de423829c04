"""BentoML services of ours over fake engines, served by a real HTTP server in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bentoml
import pytest

from pagedcore.openai import ServerSettings
from pagedcore_adapters import bentoml_service
from support.fake_engine import FakeLoop, make_fake_engine
from support.live_server import live_server

WITHOUT_METRICS = {"metrics": {"enabled": False}}
"""BentoML's own can be made once a process."""

warning_of_bentoml = pytest.mark.filterwarnings("ignore:Accessing the 'model_fields' attribute on the instance:DeprecationWarning")
"""For modules that call BentoML's routes in their process: it reads pydantic's old name."""


def service_on_fake_engine(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *,
    api_keys: tuple[str, ...] = (),
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[bentoml.Service[Any], FakeLoop]:
    """A service whose worker gets the engine of the loop that comes with it."""
    folder.mkdir(exist_ok=True)
    engine, loop = make_fake_engine(folder)
    monkeypatch.setattr(bentoml_service, "shared_engine", lambda config: engine)
    return bentoml_service.build_service({}, ServerSettings(api_keys=api_keys, **(settings or {})), **{**WITHOUT_METRICS, **options}), loop


@contextmanager
def served(service: bentoml.Service[Any]) -> Iterator[str]:
    """The base URL, while a server in a thread runs the service with its start and its end."""
    with live_server(service.to_asgi(), lifespan="on") as url:
        yield url


@contextmanager
def client_of(url: str, **options: Any) -> Iterator[Any]:
    """BentoML's synchronous client, and the end of the folder that it would leave to the garbage collector."""
    with bentoml.SyncHTTPClient(url, **options) as client:
        try:
            yield client
        finally:
            client._temp_dir.cleanup()
