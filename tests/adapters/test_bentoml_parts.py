"""The BentoML adapter without a model: what it reads from the environment and what it hands to BentoML."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bentoml
import bentoml.images
import httpx
import pytest
from packaging.specifiers import SpecifierSet

import pagedcore
from pagedcore import ConfigError, EngineConfig
from pagedcore.openai import ServerSettings
from pagedcore_adapters import _environment as environment
from pagedcore_adapters import bentoml_service
from pagedcore_adapters._bentoml_signals import on_terminate
from support.fake_engine import make_fake_engine
from support.repository import ROOT

VARIABLES = (environment.CONFIG, environment.MODEL, environment.API_KEY, environment.CORS_ORIGINS, environment.WARMUP_FILE)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_variables_the_defaults_stand() -> None:
    assert environment.config_from_environment() == EngineConfig()
    assert environment.api_keys_from_environment() == ()
    assert environment.cors_origins_from_environment() == ()
    assert environment.warmup_file_from_environment() is None


def test_origins_are_separated_by_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.CORS_ORIGINS, " https://page.example  http://localhost:3000 ")
    assert environment.cors_origins_from_environment() == ("https://page.example", "http://localhost:3000")


def test_the_model_variable_goes_before_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.CONFIG, '{"model": "a", "block_size": 32}')
    assert environment.config_from_environment() == EngineConfig(model="a", block_size=32)
    monkeypatch.setenv(environment.MODEL, "b")
    assert environment.config_from_environment() == EngineConfig(model="b", block_size=32)


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[1]", "JSON object"), ('{"block_sise": 8}', "block_sise")])
def test_a_bad_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setenv(environment.CONFIG, text)
    with pytest.raises(ConfigError, match=message):
        environment.config_from_environment()


def test_one_worker_and_no_limit_below_the_engines_unless_the_user_says_otherwise() -> None:
    service = bentoml_service.PagedCoreService
    assert isinstance(service, bentoml.Service)
    assert (service.name, service.config["workers"], service.labels) == ("pagedcore", 1, {"openai_endpoint": "/v1"})
    assert service.config["traffic"] == {"timeout": 3600}
    own = bentoml_service.build_service(name="mine", workers=2, traffic={"concurrency": 64}, labels={"team": "search"})
    assert (own.name, own.config["workers"]) == ("mine", 2)
    assert own.config["traffic"] == {"timeout": 3600, "concurrency": 64}
    assert own.labels == {"openai_endpoint": "/v1", "team": "search"}
    assert bentoml_service.build_service(traffic={"timeout": 60}).config["traffic"] == {"timeout": 60}


def test_the_native_methods_stand_beside_openais_routes() -> None:
    service = bentoml_service.PagedCoreService
    assert {method.route for method in service.apis.values()} == {"/generate", "/generate_stream", "/chat", "/chat_stream"}
    assert {name for name, method in service.apis.items() if method.is_stream} == {"generate_stream", "chat_stream"}
    assert [path for _, path, _ in service.mount_apps] == ["/"]


@pytest.mark.asyncio
async def test_the_service_builds_warms_answers_and_closes_one_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine, loop = make_fake_engine(tmp_path)
    asked: list[EngineConfig] = []
    warmed: list[list[list[int]]] = []
    monkeypatch.setattr(bentoml_service, "shared_engine", lambda config: (asked.append(config), engine)[1])
    monkeypatch.setattr(engine, "warm_up", warmed.append)
    warm_up_file = tmp_path / "warm.txt"
    warm_up_file.write_text("one\ntwo\n", encoding="utf-8")
    service = bentoml_service.build_service({"block_size": 32}, ServerSettings(api_keys=("k",)), warmup_file=str(warm_up_file))
    instance = service.inner()
    assert asked == [EngineConfig(block_size=32)]
    assert [loop.text.decode(token_ids) for token_ids in warmed[0]] == ["one", "two"]
    assert await instance.__is_ready__()
    assert await instance.__is_alive__()
    monkeypatch.setattr(bentoml, "get_current_service", lambda: instance)
    app: Any = service.mount_apps[0][0]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        body = {"model": "fake", "prompt": "a", "max_tokens": 3}
        assert (await client.post("/v1/completions", json=body)).status_code == 401
        reply = await client.post("/v1/completions", json=body, headers={"Authorization": "Bearer k"})
        assert reply.json()["choices"][0]["text"] == "The"
        assert (await client.get("/metrics")).status_code == 404  # BentoML's own stands there
    assert loop.requests[0].adapter == "bentoml"
    await instance.close()
    assert loop.is_closed
    assert not await instance.__is_alive__()


@pytest.mark.parametrize(("index", "labels"), [(None, ["0", "mine"]), (1, ["0", "mine"]), (2, ["1", "mine-1"])])
def test_each_worker_process_has_its_own_engine_label(monkeypatch: pytest.MonkeyPatch, index: int | None, labels: list[str]) -> None:
    asked: list[str] = []
    monkeypatch.setattr(bentoml_service, "shared_engine", lambda config: asked.append(config.metrics_instance))
    monkeypatch.setattr(bentoml.server_context, "worker_index", index, raising=False)
    for config in ({}, {"metrics_instance": "mine"}):
        bentoml_service.build_service(config).inner()
    assert asked == labels


def test_nothing_is_built_by_importing_the_module_or_building_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bentoml_service, "shared_engine", lambda config: pytest.fail("an engine was built"))
    assert bentoml_service.build_service().mount_apps


def test_the_image_has_the_wheel_of_this_version_and_the_packages_of_the_grammar_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    image = bentoml_service.default_image("rank-bm25==0.2.2")
    wheel = f"./wheels/pagedcore-{pagedcore.__version__}-py3-none-any.whl"
    assert image.python_requirements.splitlines() == [wheel, *project["optional-dependencies"]["grammar"], "rank-bm25==0.2.2"]
    assert image.lock_python_packages
    assert SpecifierSet(project["requires-python"]).contains(image.python_version)


def test_an_image_of_the_users_stands() -> None:
    own = bentoml.images.Image(python_version="3.12")
    assert bentoml_service.build_service(image=own).image is own


# ---- SIGTERM


@pytest.mark.skipif(sys.platform == "win32", reason="raise_signal(SIGTERM) ends the process there")
def test_sigterm_calls_what_was_asked_and_then_what_it_called_before() -> None:
    called: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append("before"))
    try:
        on_terminate(lambda: called.append("asked"))
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == ["asked", "before"]


def test_in_a_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=on_terminate, args=(lambda: None,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.asyncio
@pytest.mark.parametrize(("index", "is_closed"), [(None, False), (1, True)])
async def test_sigterm_closes_the_engine_of_a_worker_process_and_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: int | None, is_closed: bool
) -> None:
    engine, loop = make_fake_engine(tmp_path)
    monkeypatch.setattr(bentoml_service, "shared_engine", lambda config: engine)
    monkeypatch.setattr(bentoml.server_context, "worker_index", index, raising=False)
    acts: list[Callable[[], object]] = []
    monkeypatch.setattr(bentoml_service, "on_terminate", acts.append)
    instance = bentoml_service.build_service({}).inner()
    await instance.close_at_sigterm()
    for act in acts:
        act()
        await asyncio.sleep(0)
        await instance._closing
    assert loop.is_closed is is_closed
    engine.close_sync()
