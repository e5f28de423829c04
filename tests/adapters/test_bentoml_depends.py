"""The BentoML service as a dependency of another one: in the same process, and by its address."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import bentoml
import httpx
import pytest
from bentoml.exceptions import InvalidArgument

from pagedcore import UnsupportedFeatureError
from pagedcore_adapters.bentoml_service import Reply
from support.bentoml_served import WITHOUT_METRICS, client_of, served, service_on_fake_engine, warning_of_bentoml
from support.fake_engine import ANSWER

pytestmark = warning_of_bentoml


def make_outer(dependency: Any) -> bentoml.Service[Any]:
    """A service that asks the engine's one and answers in capitals."""

    @bentoml.service(name="outer", **WITHOUT_METRICS)
    class Outer:
        llm = dependency

        @bentoml.api
        async def shout(self, text: str, num_tokens: int = 10) -> str:
            reply = await self.llm.generate(text, max_tokens=num_tokens)
            assert isinstance(reply, Reply)
            return str(reply.text.upper())

        @bentoml.api
        async def shout_on(self, text: str, num_tokens: int = 10) -> AsyncGenerator[str, None]:
            async for piece in self.llm.chat_stream([{"role": "user", "content": text}], max_tokens=num_tokens):
                yield piece.upper()

        @bentoml.api
        async def several(self, text: str) -> str:
            try:
                await self.llm.generate(text, n=2)
            except UnsupportedFeatureError as error:
                return str(error)
            return ""

        @bentoml.api
        async def wrong(self, text: str) -> str:
            try:
                await self.llm.generate(text, temperature=-1.0)
            except InvalidArgument as error:
                return str(error)
            return ""

    return Outer


def test_in_process_it_is_called_without_a_key_or_a_socket_and_closed_with_the_outer_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service, loop = service_on_fake_engine(monkeypatch, tmp_path, api_keys=("a-key",))
    with served(make_outer(bentoml.depends(service))) as url, client_of(url) as client:
        assert client.shout("hi") == ANSWER[:10].upper()
        assert "".join(client.shout_on("hi")) == ANSWER[:10].upper()
        assert client.several("hi").startswith("n is not offered here")
        assert loop.text.decode(list(loop.requests[1].prompt_token_ids)) == "user: hi\nassistant: "
        assert {request.adapter for request in loop.requests} == {"bentoml"}
        assert not loop.is_closed
    assert loop.is_closed


def test_by_its_address_it_is_called_with_the_key_of_bentomls_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BENTO_CLOUD_API_KEY", "a-key")
    service, loop = service_on_fake_engine(monkeypatch, tmp_path, api_keys=("a-key",))
    with served(service) as inner_url, served(make_outer(bentoml.depends(service, url=inner_url))) as url:
        with client_of(url) as client:
            assert client.shout("hi") == ANSWER[:10].upper()
            assert "".join(client.shout_on("hi")) == ANSWER[:10].upper()
            assert "temperature is -1.0 and must be between 0 and 100." in client.wrong("hi")
        assert httpx.get(url + "/readyz").status_code == 200
        loop.close()
        assert httpx.get(url + "/readyz").status_code == 503, "it is as ready as what it depends on"


def test_by_its_address_alone_it_is_called_through_the_proxys_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    service, _ = service_on_fake_engine(monkeypatch, tmp_path)
    with served(service) as inner_url:
        assert _ask_untyped(inner_url) == ANSWER[:10]


def test_a_long_stream_outlives_the_hundred_requests_after_which_bentoml_would_change_its_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service, loop = service_on_fake_engine(monkeypatch, tmp_path)
    long, short = {"text": "long", "num_tokens": 10**9}, {"text": "short", "num_tokens": 1}
    with (
        served(service) as inner_url,
        served(make_outer(bentoml.depends(service, url=inner_url))) as url,
        httpx.stream("POST", url + "/shout_on", json=long, timeout=60) as reply,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        pieces = reply.iter_bytes()
        next(pieces)
        assert {client.post("/shout", json=short).status_code for _ in range(110)} == {200}
        assert loop.aborted == []
        assert next(pieces)


def test_in_process_who_leaves_the_outer_service_ends_the_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    service, loop = service_on_fake_engine(monkeypatch, tmp_path)
    with served(make_outer(bentoml.depends(service))) as url:
        with httpx.stream("POST", url + "/shout_on", json={"text": "long", "num_tokens": 10**9}, timeout=60) as reply:
            next(reply.iter_bytes())
        assert loop.wait_until(lambda: loop.aborted == [loop.requests[0].request_id])


def _ask_untyped(inner_url: str) -> str:
    @bentoml.service(name="outer", **WITHOUT_METRICS)
    class Outer:
        llm = bentoml.depends(url=inner_url)

        @bentoml.api
        async def ask(self, text: str) -> str:
            return str((await self.llm.to_async.generate(prompt=text, max_tokens=10))["text"])

    with served(Outer) as url, client_of(url) as client:
        return str(client.ask("hi"))
