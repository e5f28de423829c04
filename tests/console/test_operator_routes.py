"""Operators' routes over a scripted engine: keys, tenants, several workers, errors, the page's own files."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from pagedcore.console.page_files import FOLDER, page_names
from pagedcore.errors import EngineClosedError, NoAnswerError
from pagedcore.openai import ServerSettings, build_app
from support.console import make_stats
from support.fake_client import FakeClient, Script
from support.live_server import live_server

OPERATOR_ONLY = ("/v1/stats", "/v1/cache/advice", "/v1/trace", "/ui/feed", "/ui/request/r")
FOR_TENANTS = ("/v1/requests", "/v1/requests/r", "/v1/cache/explain/r")
KEYED = ServerSettings(api_keys=("root",), tenants={"red-key": "red"})


async def get(client: FakeClient, path: str, settings: ServerSettings | None = None, key: str | None = None) -> httpx.Response:
    transport = httpx.ASGITransport(app=build_app(client, settings), raise_app_exceptions=False)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
        return await http.get(path)


def make_client(**answers: Any) -> FakeClient:
    client = FakeClient()
    known = {"stats": [make_stats()], "requests": [{"requests": []}], "request": [{"request_id": "r"}], "explain": [{"request_id": "r"}]}
    client.answers = {**known, "advice": [{"engine": "0"}], "trace": [{"traceEvents": []}], **answers}
    return client


# ---- who may ask


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [*OPERATOR_ONLY, *FOR_TENANTS])
@pytest.mark.parametrize("key", [None, "wrong"])
async def test_without_the_right_key_nothing_is_asked(path: str, key: str | None) -> None:
    client = make_client()
    response = await get(client, path, KEYED, key)
    assert (response.status_code, response.json()["error"]["code"], client.asked) == (401, "invalid_api_key", [])


@pytest.mark.asyncio
@pytest.mark.parametrize("path", OPERATOR_ONLY)
async def test_what_concerns_all_tenants_is_refused_to_one(path: str) -> None:
    client = make_client()
    response = await get(client, path, KEYED, "red-key")
    assert (response.status_code, response.json()["error"]["code"], client.asked) == (403, "operator_only", [])


@pytest.mark.asyncio
@pytest.mark.parametrize("path", FOR_TENANTS)
async def test_a_tenant_asks_as_himself_and_an_operator_as_operator(path: str) -> None:
    for key, who in [("red-key", {"tenant": "red", "is_operator": False}), ("root", {"tenant": None, "is_operator": True})]:
        client = make_client()
        assert (await get(client, path, KEYED, key)).status_code == 200
        ((_, arguments),) = client.asked
        assert who.items() <= arguments.items()


@pytest.mark.asyncio
async def test_a_query_cannot_name_another_tenant() -> None:
    client = make_client()
    await get(client, "/v1/requests?tenant=blue&is_operator=true", KEYED, "red-key")
    assert client.asked == [("requests", {"limit": 50, "search": "", "tenant": "red", "is_operator": False})]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "path", ["/metrics", "/v1/stats", "/v1/requests", "/v1/cache/explain/r", "/v1/trace", "/ui", "/ui/page.js", "/ui/feed"]
)
async def test_without_operator_routes_none_of_them_exists(path: str) -> None:
    response = await get(make_client(), path, ServerSettings(allow_operator_routes=False))
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")


@pytest.mark.asyncio
async def test_a_host_with_metrics_of_its_own_keeps_the_other_routes() -> None:
    settings = ServerSettings(serve_metrics=False)
    assert (await get(make_client(), "/metrics", settings)).status_code == 404
    assert (await get(make_client(), "/v1/stats", settings)).status_code == 200


# ---- what they answer


@pytest.mark.asyncio
async def test_stats_and_advice_list_each_worker() -> None:
    client = make_client(stats=[make_stats(engine="0"), make_stats(engine="1")], advice=[{"engine": "0"}, {"engine": "1"}])
    for path in ("/v1/stats", "/v1/cache/advice"):
        body = (await get(client, path)).json()
        assert (body["object"], [one["engine"] for one in body["data"]]) == ("list", ["0", "1"])


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v1/requests/r", "/v1/cache/explain/r"])
async def test_the_worker_that_knows_a_request_answers_for_it(path: str) -> None:
    client = make_client(request=[{}, {"request_id": "r", "engine": "1"}], explain=[{}, {"request_id": "r", "engine": "1"}])
    assert (await get(client, path)).json() == {"request_id": "r", "engine": "1"}


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v1/requests/none", "/v1/cache/explain/none", "/ui/request/none"])
async def test_a_request_that_no_worker_knows_is_a_typed_404(path: str) -> None:
    response = await get(make_client(request=[{}, {}], explain=[{}, {}]), path)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")
    assert "'none'" in response.json()["error"]["message"]


@pytest.mark.asyncio
async def test_an_id_with_slashes_reaches_the_engine_whole() -> None:
    client = make_client()
    await get(client, "/v1/cache/explain/team/job%2F1%23x")
    assert client.asked[0][1]["request_id"] == "team/job/1#x"


@pytest.mark.asyncio
@pytest.mark.parametrize(("asked", "names"), [("chatcmpl-r", ["chatcmpl-r", "r"]), ("cmpl-r", ["cmpl-r", "r"]), ("r-cmpl-", ["r-cmpl-"])])
async def test_the_id_of_a_reply_finds_its_request_and_an_id_of_that_form_goes_first(asked: str, names: list[str]) -> None:
    for question, path in (("request", "/v1/requests"), ("explain", "/v1/cache/explain")):
        client = make_client(**{question: [{}]})
        assert (await get(client, f"{path}/{asked}")).status_code == 404
        assert [arguments["request_id"] for _, arguments in client.asked] == names
        known = make_client()
        assert (await get(known, f"{path}/{asked}")).status_code == 200
        assert [arguments["request_id"] for _, arguments in known.asked] == names[:1]


@pytest.mark.asyncio
async def test_requests_of_all_workers_come_newest_first_and_cut() -> None:
    def records(*ages: float) -> dict[str, Any]:
        return {"requests": [{"request_id": str(age), "age_s": age} for age in ages]}

    client = make_client(requests=[records(1.0, 5.0), records(2.0, 3.0)])
    body = (await get(client, "/v1/requests?limit=3&search=x%20y")).json()
    assert [one["age_s"] for one in body["data"]] == [1.0, 2.0, 3.0]
    assert client.asked[0][1] == {"limit": 3, "search": "x y", "tenant": None, "is_operator": True}


@pytest.mark.asyncio
@pytest.mark.parametrize("limit", ["0", "1001", "-1", "many", "1e3", "٣", ""])
async def test_a_limit_out_of_range_is_refused_by_name(limit: str) -> None:
    response = await get(make_client(), f"/v1/requests?limit={limit}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")


@pytest.mark.asyncio
async def test_the_trace_is_a_file_and_workers_keep_their_tracks_apart() -> None:
    client = make_client(trace=[{"traceEvents": [{"pid": 1, "name": "a"}]}, {"traceEvents": [{"pid": 1, "name": "b"}]}])
    response = await get(client, "/v1/trace")
    assert "attachment" in response.headers["Content-Disposition"]
    assert [(event["name"], event["pid"]) for event in response.json()["traceEvents"]] == [("a", 1), ("b", 101)]
    alone = make_client(trace=[{"displayTimeUnit": "ms", "traceEvents": [{"pid": 1}]}])
    assert (await get(alone, "/v1/trace")).json() == {"displayTimeUnit": "ms", "traceEvents": [{"pid": 1}]}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "status"), [(NoAnswerError("Worker process 1 did not answer."), 504), (EngineClosedError("It is closed."), 503)]
)
async def test_a_worker_that_does_not_answer_is_a_typed_error(error: Any, status: int) -> None:
    response = await get(make_client(stats=error), "/v1/stats")
    assert (response.status_code, response.json()["error"]["message"]) == (status, str(error))


@pytest.mark.asyncio
@pytest.mark.parametrize(("is_shown", "text"), [(False, "none"), (True, "all")])
async def test_the_page_gets_text_only_where_the_server_says_so(is_shown: bool, text: str) -> None:
    client = make_client()
    response = await get(client, "/ui/request/r", ServerSettings(ui_show_text=is_shown))
    assert response.json() == {"request": {"request_id": "r"}, "explanation": {"request_id": "r"}}
    assert dict(client.asked)["explain"] == {"request_id": "r", "show_text": text}


# ---- the feed


def first_event(url: str) -> tuple[str, dict[str, Any]]:
    with httpx.stream("GET", url + "/ui/feed", timeout=60) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = response.iter_lines()
        first = next(lines)
        kind, data = (first, next(lines)) if first.startswith("event: ") else ("event: message", first)
        return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_an_event_holds_numbers_blocks_and_verdicts_of_each_worker() -> None:
    client = make_client(
        stats=[make_stats(engine="0"), make_stats(engine="1", num_waiting=3)],
        blocks=[{"engine": "1", "states": "f"}, {"engine": "0", "states": "a"}],
    )
    with live_server(build_app(client)) as url:
        kind, event = first_event(url)
    assert kind == "message"
    assert [(one["engine"], one["blocks"]["states"]) for one in event["engines"]] == [("0", "a"), ("1", "f")]
    assert [one["indicators"][-1]["verdict"] for one in event["engines"]] == ["good", "attention"]


def test_a_worker_that_does_not_answer_is_told_to_the_viewers() -> None:
    with live_server(build_app(make_client(stats=NoAnswerError("Worker process 1 did not answer.")))) as url:
        kind, event = first_event(url)
    assert (kind, event["error"]["code"]) == ("error", "no_answer")


# ---- the page's files


@pytest.mark.asyncio
async def test_the_page_and_its_files_need_no_key_and_load_nothing_from_elsewhere() -> None:
    for name in page_names():
        response = await get(make_client(), "/ui" if name == "index.html" else f"/ui/{name}", KEYED)
        assert response.status_code == 200, name
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy
        assert (response.headers["X-Content-Type-Options"], response.headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", response.text), name


def test_the_page_names_files_that_exist_and_holds_nothing_inline() -> None:
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert {path.removeprefix("ui/") for path in re.findall(r'(?:src|href)="(ui/[^"]+)"', html)} <= set(page_names())
    assert not re.search(r"<style|style=|<script(?![^>]*src)|\son\w+=", html)
    for name in page_names():
        source = (FOLDER / name).read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", source), name
        for imported in re.findall(r'from "\./([^"]+)"', source):
            assert imported in page_names()


def test_every_file_of_the_page_is_one_that_is_served() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(page_names())


# ---- the cache of a reply


async def complete(body: dict[str, Any]) -> httpx.Response:
    transport = httpx.ASGITransport(app=build_app(FakeClient(Script(num_cached_tokens=4))), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await http.post("/v1/completions", json={"prompt": "hello", **body})


@pytest.mark.asyncio
async def test_a_reply_says_where_its_prompt_came_from_when_asked() -> None:
    assert "cache" not in (await complete({})).json()
    body = (await complete({"cache_report": True})).json()
    assert body["cache"]["tokens"]["pool"] == body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


@pytest.mark.asyncio
async def test_a_stream_says_it_in_the_chunk_that_ends_it_and_counts_no_usage_unasked() -> None:
    chunks = [
        json.loads(line[6:])
        for line in (await complete({"cache_report": True, "stream": True})).text.splitlines()
        if line.startswith("data: {")
    ]
    assert chunks[-1]["cache"]["tokens"]["pool"] == 4
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert not any("cache" in chunk for chunk in chunks[:-1])
    assert not any("usage" in chunk for chunk in chunks)
