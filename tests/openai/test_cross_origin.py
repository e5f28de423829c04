"""CORS: what a browser asks before a page of another origin may call the server, and what it then lets the page read."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pagedcore.errors import ConfigError, EngineClosedError
from pagedcore.openai import ServerSettings, add_error_handlers, build_app, build_router
from support.fake_client import FakeClient

PAGE = "https://page.example"
OTHER = "https://other.example"
BODY = {"messages": [{"role": "user", "content": "hi"}]}
ASKED = "authorization,content-type,x-stainless-os"
"""Headers that OpenAI's own client sends from a browser."""

CORS_HEADERS = ("Access-Control-Allow-Origin", "Access-Control-Allow-Credentials", "Vary")


def app_for(*origins: str, client: FakeClient | None = None, **settings: Any) -> FastAPI:
    return build_app(client or FakeClient(), ServerSettings(cors_origins=origins, **settings))


async def ask(app: Any, method: str, path: str, origin: str | None = PAGE, **arguments: Any) -> httpx.Response:
    headers = {**({"Origin": origin} if origin else {}), **arguments.pop("headers", {})}
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, headers=headers, **arguments)


async def preflight(app: Any, path: str, origin: str | None = PAGE, method: str = "POST") -> httpx.Response:
    asked = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": ASKED}
    return await ask(app, "OPTIONS", path, origin, headers=asked)


def cors(response: httpx.Response) -> tuple[str | None, ...]:
    return tuple(response.headers.get(name) for name in CORS_HEADERS)


@pytest.mark.asyncio
async def test_by_default_no_page_may_call() -> None:
    app = build_app(FakeClient())
    assert (await preflight(app, "/v1/chat/completions")).status_code == 405
    reply = await ask(app, "POST", "/v1/chat/completions", json=BODY)
    assert (reply.status_code, cors(reply)) == (200, (None, None, None))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/chat/completions", "POST"),
        ("/v1/completions", "POST"),
        ("/tokenize", "POST"),
        ("/v1/models", "GET"),
        ("/v1/models/an/id", "GET"),
        ("/health", "GET"),
    ],
)
async def test_a_preflight_of_a_page_in_the_list_allows_what_clients_send_and_needs_no_key(path: str, method: str) -> None:
    response = await preflight(app_for(PAGE, "http://localhost:3000", api_keys=("key",)), path, method=method)
    assert (response.status_code, response.content) == (204, b"")
    assert cors(response) == (PAGE, "true", "Access-Control-Request-Headers, Origin")
    assert method in response.headers["Access-Control-Allow-Methods"].split(", ")
    assert response.headers["Access-Control-Allow-Headers"] == ASKED
    assert int(response.headers["Access-Control-Max-Age"]) > 0


@pytest.mark.asyncio
@pytest.mark.parametrize("origin", [OTHER, "null", "http://page.example", PAGE + ".evil.example", None])
async def test_a_preflight_of_another_page_is_refused_with_the_reason(origin: str | None) -> None:
    response = await preflight(app_for(PAGE), "/v1/chat/completions", origin)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unknown_origin"
    assert cors(response) == (None, None, "Origin")


@pytest.mark.asyncio
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_page_in_the_list_reads_answers_and_streams_and_another_does_not(is_stream: bool) -> None:
    app = app_for(PAGE)
    reply = await ask(app, "POST", "/v1/chat/completions", json={**BODY, "stream": is_stream})
    assert (reply.status_code, cors(reply)) == (200, (PAGE, "true", "Origin"))
    assert "X-Request-Id" in reply.headers["Access-Control-Expose-Headers"]
    for origin in (OTHER, None):
        reply = await ask(app, "POST", "/v1/chat/completions", origin, json={**BODY, "stream": is_stream})
        assert (reply.status_code, cors(reply)) == (200, (None, None, "Origin"))


@pytest.mark.asyncio
@pytest.mark.parametrize("origin", [PAGE, OTHER, "null"])
async def test_a_star_is_every_page_and_never_with_cookies(origin: str) -> None:
    app = app_for("*")
    for response in (await preflight(app, "/v1/completions", origin), await ask(app, "GET", "/v1/models", origin)):
        assert response.is_success
        assert cors(response)[:2] == ("*", None)


@pytest.mark.asyncio
async def test_operators_routes_are_for_pages_that_are_named_only() -> None:
    for path in ("/v1/stats", "/metrics", "/ui"):
        assert cors(await ask(app_for("*"), "GET", path))[0] is None, path
        assert (await preflight(app_for("*"), path, method="GET")).status_code == 405
        assert cors(await ask(app_for(PAGE), "GET", path))[0] == PAGE, path
        assert (await preflight(app_for(PAGE), path, method="GET")).status_code == 204


class Failing(FakeClient):
    async def is_ready(self) -> bool:
        raise EngineClosedError("No.")

    async def is_alive(self) -> bool:
        raise RuntimeError


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path", "arguments", "status"),
    [
        ("POST", "/v1/completions", {"json": {"promt": 1}}, 400),
        ("POST", "/v1/completions", {"json": {"prompt": "a"}, "headers": {"Authorization": "Bearer wrong"}}, 401),
        ("POST", "/v1/embeddings", {"json": {}}, 404),
        ("GET", "/v1/completions", {}, 405),
        ("POST", "/v1/completions", {"content": "a", "headers": {"Content-Type": "text/plain"}}, 415),
        ("GET", "/health", {}, 500),
        ("GET", "/ready", {}, 503),
    ],
)
async def test_a_page_may_read_why_it_failed(method: str, path: str, arguments: dict[str, Any], status: int) -> None:
    app = app_for(PAGE, client=Failing(), api_keys=("key",))
    arguments["headers"] = {"Authorization": "Bearer key", **arguments.get("headers", {})}
    response = await ask(app, method, path, **arguments)
    assert response.status_code == status
    assert cors(response) == (PAGE, "true", "Origin")
    assert response.json()["error"]["message"]


@pytest.mark.asyncio
async def test_a_host_apps_routes_are_the_hosts_affair() -> None:
    host = FastAPI()
    host.include_router(build_router(FakeClient(), ServerSettings(cors_origins=(PAGE,))), prefix="/llm")
    add_error_handlers(host)

    @host.get("/own")
    async def own() -> dict[str, str]:
        return {}

    assert cors(await ask(host, "GET", "/own")) == (None, None, None)
    assert (await preflight(host, "/own", method="GET")).status_code == 405
    assert cors(await ask(host, "GET", "/llm/v1/models"))[0] == PAGE
    assert (await preflight(host, "/llm/v1/completions")).status_code == 204


@pytest.mark.parametrize(
    "origin",
    [
        "page.example", "https://page.example/", "https://page.example/app", "https://*.page.example", "HTTPS://page.example",
        "https://Page.example", "https://page.example:443", "http://page.example:80", "https://me@page.example", "null", "", "https://",
    ],
)  # fmt: skip
def test_what_no_browser_sends_as_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins holds") as caught:
        ServerSettings(cors_origins=(origin,))
    assert repr(origin) in str(caught.value)


def test_a_star_stands_alone_and_a_text_is_no_list() -> None:
    with pytest.raises(ConfigError, match="give '\\*' alone"):
        ServerSettings(cors_origins=("*", PAGE))
    with pytest.raises(ConfigError, match="must be a tuple"):
        ServerSettings(cors_origins=PAGE)  # type: ignore[arg-type]


@pytest.mark.parametrize("origins", [None, 5, [PAGE], (5,), (None,)])
def test_what_is_no_tuple_of_texts_is_refused(origins: Any) -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        ServerSettings(cors_origins=origins)


def test_origins_that_browsers_send_are_taken() -> None:
    origins = ("http://localhost:3000", "https://page.example:8443", "chrome-extension://abcdef", "tauri://localhost", "http://[::1]:80000")
    assert ServerSettings(cors_origins=origins).cors_origins == origins
