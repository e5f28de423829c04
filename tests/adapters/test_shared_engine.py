"""One engine a configuration, as long as it lives."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagedcore import AsyncEngine, ConfigError, EngineConfig
from pagedcore_adapters import shared_engine as module
from pagedcore_adapters.langchain_chat import ChatPagedCore, PagedCoreLLM
from pagedcore_adapters.shared_engine import close_shared_engines, shared_engine
from support.fake_engine import make_fake_engine
from support.served import free_port


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[EngineConfig]]:
    """The configurations of engines that were built; each is a fake one."""
    configs: list[EngineConfig] = []

    def build(config: EngineConfig) -> AsyncEngine:
        configs.append(config)
        return make_fake_engine(tmp_path)[0]

    monkeypatch.setattr(module, "AsyncEngine", build)
    yield configs
    close_shared_engines()


def test_equal_configurations_share_and_others_do_not(built: list[EngineConfig]) -> None:
    first = shared_engine(EngineConfig(block_size=32))
    assert shared_engine(EngineConfig(block_size=32)) is first
    assert shared_engine(EngineConfig(block_size=64)) is not first
    assert len(built) == 2


def test_threads_that_ask_at_once_get_one(built: list[EngineConfig]) -> None:
    with ThreadPoolExecutor(8) as pool:
        engines = set(pool.map(lambda _: shared_engine(EngineConfig()), range(8)))
    assert len(engines) == len(built) == 1


def test_a_closed_engine_is_replaced(built: list[EngineConfig]) -> None:
    shared_engine(EngineConfig()).close_sync()
    assert shared_engine(EngineConfig()).loop.is_alive
    assert len(built) == 2


def test_closing_all_closes_each(built: list[EngineConfig]) -> None:
    engines = [shared_engine(EngineConfig(block_size=size)) for size in (8, 16)]
    close_shared_engines()
    assert not any(engine.loop.is_alive for engine in engines)


def test_one_that_cannot_be_closed_keeps_no_other_from_it(built: list[EngineConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("it hangs on something")

    first, broken, last = (shared_engine(EngineConfig(block_size=size)) for size in (8, 16, 32))
    monkeypatch.setattr(broken, "close_sync", fail)
    with pytest.raises(OSError, match="hangs on something"):
        close_shared_engines()
    assert not first.loop.is_alive
    assert not last.loop.is_alive
    monkeypatch.undo()
    broken.close_sync()


def test_models_without_an_engine_share_one_started_at_the_first_call(built: list[EngineConfig]) -> None:
    models: list[Any] = [ChatPagedCore(max_tokens=1), ChatPagedCore(max_tokens=2, temperature=0), PagedCoreLLM(max_tokens=1)]
    assert built == []
    for model in models:
        model.invoke("a")
    assert built == [EngineConfig()]


def test_a_models_engine_is_that_of_its_model_and_settings(built: list[EngineConfig]) -> None:
    ChatPagedCore(model="a", engine_config={"block_size": 32}, max_tokens=1).invoke("a")
    ChatPagedCore(model="a", engine_config=EngineConfig(block_size=32), max_tokens=1).invoke("a")
    ChatPagedCore(engine_config={"block_size": 32}, max_tokens=1).invoke("a", model="b")
    assert built == [EngineConfig(model="a", block_size=32), EngineConfig(model="b", block_size=32)]


def test_metrics_are_served_on_a_port_when_asked_and_only_once(built: list[EngineConfig]) -> None:
    port = free_port()
    for _ in range(2):
        ChatPagedCore(metrics_port=port)
    assert built == [EngineConfig()]
    assert httpx.get(f"http://127.0.0.1:{port}/metrics").status_code == 200
    module._metrics_servers.pop(port).close()


@pytest.mark.parametrize("kind", ["in use", "no port"])
def test_a_metrics_port_that_cannot_be_used_is_an_error_that_names_it(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1] if kind == "in use" else 70_000
        with pytest.raises(ConfigError, match=f"metrics_port is {port}, which cannot be used"):
            module.serve_metrics(port)
    assert port not in module._metrics_servers
