"""A BentoML service of an engine at a Unix socket: its workers share it with every other door."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bentoml
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedcore import AsyncEngine, ConfigError, EngineConfig, SamplingParams
from pagedcore.openai import ServerSettings
from pagedcore_adapters import _environment as environment
from pagedcore_adapters import bentoml_service
from support.remote_engines import hosted, short_folder
from support.repository import ROOT
from support.served import free_port, serve, wait_until

PROMPT = [token % 41 for token in range(100)]
CACHED = 96


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (environment.CONFIG, environment.MODEL, environment.API_KEY, environment.WARMUP_FILE, environment.SOCKET):
        monkeypatch.delenv(name, raising=False)


def complete(url: str, prompt: list[int] = PROMPT) -> int:
    """Cached prompt tokens of one answer."""
    reply = httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 4}, timeout=60)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def num_completed(exposition: str) -> dict[str, float]:
    """By the door that the requests came through."""
    families = text_string_to_metric_families(exposition)
    samples = [sample for family in families for sample in family.samples if sample.name == "pagedcore_requests_total" and sample.value]
    return {sample.labels["adapter"]: sample.value for sample in samples}


@pytest.mark.parametrize(
    "make",
    [
        lambda: bentoml_service.build_service({"block_size": 32}, socket="/tmp/x.sock"),
        lambda: bentoml_service.build_service(EngineConfig(), socket=Path("/tmp/x.sock")),
        lambda: bentoml_service.build_service(socket="/tmp/x.sock", warmup_file="prompts.json"),
    ],
)
def test_what_the_engine_at_a_socket_has_already_is_not_given_again(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"The engine at '/tmp/x\.sock' has its config"):
        make()


async def ask(app: Any, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        return await (client.get(path) if body is None else client.post(path, json=body))


def make_worker(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, Any]:
    """What a worker of BentoML makes of the service: the instance, and its app."""
    service = bentoml_service.build_service(**options)
    instance = service.inner()
    monkeypatch.setattr(bentoml, "get_current_service", lambda: instance)
    return instance, service.mount_apps[0][0]


@pytest.mark.asyncio
@pytest.mark.parametrize("by_environment", [False, True])
async def test_a_worker_asks_the_engine_at_the_socket_and_its_end_is_not_the_engines(
    monkeypatch: pytest.MonkeyPatch, *, by_environment: bool
) -> None:
    with hosted() as one:
        if by_environment:  # a Bento's own names a model, too
            monkeypatch.setenv(environment.SOCKET, str(one.path))
            monkeypatch.setenv(environment.MODEL, "SmolLM2-135M-Instruct")
            monkeypatch.setenv(environment.WARMUP_FILE, "/nowhere/prompts.json")
        worker, app = make_worker(monkeypatch, **({} if by_environment else {"socket": one.path}))
        assert await worker.is_ready()
        reply = await ask(app, "/v1/completions", {"prompt": PROMPT, "max_tokens": 4})
        assert reply.json()["usage"]["completion_tokens"] == 4
        assert one.built.engine.stats().num_finished["completed"] == 1
        assert [record["adapter"] for record in one.built.engine.history.recent()] == ["bentoml"]
        numbers = await ask(app, "/engine/metrics")
        assert (numbers.status_code, numbers.headers["content-type"].split(";")[0]) == (200, "text/plain")
        await worker.close()
        assert not await worker.is_ready()
        assert (await ask(app, "/engine/metrics")).status_code == 503
        wait_until(lambda: one.server.num_fronts == 0, 60, "the engine goes on alone")
        assert await one.built.engine.is_ready()


def test_a_config_of_the_hosts_code_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.SOCKET, "/nowhere/engine.sock")
    made: list[EngineConfig] = []
    monkeypatch.setattr(bentoml_service, "shared_engine", made.append)
    monkeypatch.setattr(bentoml_service, "OpenAIService", lambda *_: None)
    bentoml_service.build_service({"block_size": 32}).inner()
    assert [config.block_size for config in made] == [32]


@pytest.mark.asyncio
async def test_where_operators_are_kept_out_the_engines_numbers_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    with hosted() as one:
        worker, app = make_worker(monkeypatch, socket=one.path, settings=ServerSettings(allow_operator_routes=False))
        assert (await ask(app, "/engine/metrics")).status_code == 404
        await worker.close()


def ask_from_a_script(path: Path) -> int:
    """Cached prompt tokens of an answer to a process that attaches by itself."""

    async def run() -> int:
        engine = AsyncEngine.connect(path, timeout_s=60)
        outputs = [output async for output in engine.generate(PROMPT, SamplingParams(max_tokens=4))]
        await engine.close()
        return outputs[-1].num_cached_tokens

    return asyncio.run(run())


@pytest.mark.serve
@pytest.mark.slow
def test_workers_of_bentoml_and_litserve_and_a_script_share_one_engine_one_pool_and_one_book(tmp_path: Path) -> None:
    bento_port, lit_port = free_port(), free_port()
    bento = ["-m", "bentoml", "serve", "support.bentoml_app:attached", "--host", "127.0.0.1", "--port", str(bento_port)]
    with short_folder() as folder:
        path = folder / "engine.sock"
        env = {"BENTOML_HOME": str(tmp_path / "bentoml"), "BENTOML_DO_NOT_TRACK": "True", "ENGINE_SOCKET": str(path)}
        lit = [str(ROOT / "tests" / "support" / "litserve_socket_app.py"), str(lit_port), str(path), "openai", "2"]
        with (
            serve(["-m", "support.fake_engine_process", str(path)], tmp_path / "engine.log", port=0, ready_path=None),
            serve(bento, tmp_path / "bento.log", port=bento_port, ready_path="/readyz", env=env) as bentoml_server,
        ):
            with serve(lit, tmp_path / "lit.log", port=lit_port, ready_path="/ready") as litserve_server:
                assert complete(litserve_server.url) == 0
                with ThreadPoolExecutor(4) as pool:
                    assert list(pool.map(lambda _: complete(bentoml_server.url), range(8))) == [CACHED] * 8
                assert ask_from_a_script(path) == CACHED
                expected = {"litserve": 1.0, "bentoml": 8.0, "library": 1.0}
                books = [f"{bentoml_server.url}/engine/metrics", f"{litserve_server.url}/metrics"]
                assert [num_completed(httpx.get(book, timeout=60).text) for book in books] == [expected] * 2
            bentoml_server.terminate()
            assert ask_from_a_script(path) == CACHED, "the engine goes on"
