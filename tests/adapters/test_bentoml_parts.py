"""The BentoML adapter without a model: what it reads from the environment and what it hands to BentoML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bentoml
import httpx
import pytest

import pagedcore
from pagedcore import ConfigError, EngineConfig
from pagedcore.openai import ServerSettings
from pagedcore_adapters import _environment as environment
from pagedcore_adapters import bentoml_service
from support.fake_engine import make_fake_engine
from support.repository import ROOT

VARIABLES = (environment.CONFIG, environment.MODEL, environment.API_KEY, environment.WARMUP_FILE)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_without_variables_the_defaults_stand() -> None:
    assert environment.config_from_environment() == EngineConfig()
    assert environment.api_keys_from_environment() == ()
    assert environment.warmup_file_from_environment() is None


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


def test_one_worker_and_a_long_time_to_the_first_byte_unless_the_user_says_otherwise() -> None:
    service = bentoml_service.PagedCoreService
    assert isinstance(service, bentoml.Service)
    assert (service.name, service.config["workers"], service.config["traffic"]["timeout"]) == ("pagedcore", 1, 3600)
    own = bentoml_service.build_service(name="mine", workers=2, traffic={"timeout": 60})
    assert (own.name, own.config["workers"], own.config["traffic"]["timeout"]) == ("mine", 2, 60)


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
    assert not await instance.__is_ready__()
    await instance.warm_up()
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


def test_the_bentofile_names_the_wheel_of_this_version() -> None:
    text = (ROOT / "deploy" / "bentofile.yaml").read_text(encoding="utf-8")
    assert text.count(f"wheels/pagedcore-{pagedcore.__version__}-py3-none-any.whl") == 2
