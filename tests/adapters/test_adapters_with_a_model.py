"""The three doors with the real embedded model: answers, streams, aborts, and one catalogue of metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from prometheus_client.parser import text_string_to_metric_families

from pagedcore import AsyncEngine, EngineConfig, SamplingParams
from pagedcore_adapters.langchain_chat import ChatPagedCore, PagedCoreLLM
from pagedcore_adapters.shared_engine import close_shared_engines, shared_engine
from support.repository import ROOT
from support.served import Served, free_port, post_and_leave, serve, wait_until

pytestmark = [pytest.mark.model, pytest.mark.serve, pytest.mark.slow]

MODEL = "SmolLM2-135M-Instruct"
CONFIG: dict[str, Any] = {
    "num_kv_blocks": 512,
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "max_waiting_requests": 20,
    "dtype": "float32",  # so that the same prompt gives the same text whoever shares the batch
}
QUESTION = "What is the capital of France?"
SUPPORT = ROOT / "tests" / "support"


def serve_litserve(tmp_path: Path, *, num_api_servers: int = 1, **options: Any) -> AbstractContextManager[Served]:
    port = free_port()
    arguments = [str(SUPPORT / "litserve_app.py"), str(port), json.dumps({**CONFIG, **options}), str(num_api_servers)]
    return serve(arguments, tmp_path / "litserve.log", port=port)


def serve_bentoml(tmp_path: Path, **options: Any) -> AbstractContextManager[Served]:
    port = free_port()
    arguments = [
        "-m",
        "bentoml",
        "serve",
        "pagedcore_adapters.bentoml_service:PagedCoreService",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    env = {"PAGEDCORE_CONFIG": json.dumps({**CONFIG, **options}), "BENTOML_HOME": str(tmp_path / "bentoml"), "BENTOML_DO_NOT_TRACK": "True"}
    return serve(arguments, tmp_path / "bentoml.log", port=port, ready_path="/readyz", env=env)


SERVERS = {"litserve": serve_litserve, "bentoml": serve_bentoml}


@pytest.fixture(scope="module", params=list(SERVERS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server of each kind for the tests of what a client sees."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "litserve":
        with serve_litserve(folder, num_api_servers=2) as server:
            yield server
    else:
        with serve_bentoml(folder) as server:
            yield server


def chat(served: Served, content: str, **options: Any) -> Any:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        reply = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], temperature=0, **options)
        return list(reply) if options.get("stream") else reply


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels) -> value of our families."""
    families = [family for family in text_string_to_metric_families(text) if family.name.startswith("pagedcore_")]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for family in families for sample in family.samples}


def total(text: str, name: str, **labels: str) -> float:
    return sum(value for (one, own), value in samples(text).items() if one == name and labels.items() <= dict(own).items())


# ---- what a client sees


def test_the_openai_client_gets_the_capital_whole_and_streamed(served: Served) -> None:
    whole = chat(served, QUESTION, max_tokens=20)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    chunks = chat(served, QUESTION, max_tokens=20, stream=True, stream_options={"include_usage": True})
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(pieces) > 3
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 32


def test_sixteen_streams_at_once_equal_one_at_a_time(served: Served) -> None:
    questions = [f"Count from {n} to {n + 5}." for n in range(16)]

    def streamed(question: str) -> str:
        return "".join(chunk.choices[0].delta.content or "" for chunk in chat(served, question, max_tokens=12, stream=True))

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(streamed, questions))
    assert together[:3] == [streamed(question) for question in questions[:3]]
    assert all(together)


def test_an_operator_sees_the_requests_why_they_missed_and_the_live_page(served: Served) -> None:
    def ask(request_id: str, ending: str) -> None:
        prompt = "The bank answers in short and polite sentences and cites the rule that applies. " * 4 + ending
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
        assert httpx.post(served.url + "/v1/completions", json=body, headers={"X-Request-Id": request_id}, timeout=120).status_code == 200

    ask("explained-1", "How do I block my card?")
    ask("explained-2", "How do I order a new one?")
    explained = served.get("/v1/cache/explain/explained-2").json()
    assert sum(explained["tokens"].values()) == explained["prompt_tokens"]
    assert explained["tokens"]["pool"] >= 48
    left = explained["first_divergence"]
    assert left["token"] == explained["nearest_cached_prefix_tokens"]
    assert (left["text_before"].endswith("How do I"), left["text_after"].startswith(" order a new")) == (True, True)
    assert [one["request_id"] for one in served.get("/v1/requests?search=explained").json()["data"]] == ["explained-2", "explained-1"]
    events = [event["name"] for event in served.get("/v1/requests/explained-1").json()["events"]]
    assert (events[0], events[-1]) == ("arrived", "finished")
    (stats,) = served.get("/v1/stats").json()["data"]
    assert stats["num_finished"]["completed"] >= 2
    assert served.get("/v1/cache/advice").json()["data"][0]["num_lookups"] >= 2
    assert {"explained-1", "explained-2"} <= {event["name"] for event in served.get("/v1/trace").json()["traceEvents"]}
    assert "text_before" not in served.get("/ui/request/explained-2").text
    assert "default-src 'none'" in served.get("/ui").headers["Content-Security-Policy"]
    with httpx.stream("GET", served.url + "/ui/feed", timeout=60) as reply:
        event = json.loads(next(reply.iter_lines()).removeprefix("data: "))
    assert event["engines"][0]["blocks"]["num_blocks"] == CONFIG["num_kv_blocks"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_the_generation(served: Served, stream: bool) -> None:
    def num_aborted() -> float:
        return total(served.get("/metrics").text, "pagedcore_requests_total", status="aborted")

    def num_running() -> float:
        return total(served.get("/metrics").text, "pagedcore_open_requests", state="running")

    before = num_aborted()
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    if stream:
        with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=60) as reply:
            next(reply.iter_lines())
    else:
        post_and_leave(served.url + "/v1/completions", body, lambda: num_running() == 1)
    wait_until(lambda: num_aborted() == before + 1, 60, "the abort in /metrics")
    wait_until(lambda: num_running() == 0, 60, "nothing running")


def test_a_full_queue_is_429_with_retry_after(served: Served) -> None:
    """Sixteen run and twenty wait at most."""
    body = {"model": MODEL, "prompt": ["Once upon a time"] * 60, "max_tokens": 200, "ignore_eos": True}
    reply = httpx.post(served.url + "/v1/completions", json=body, timeout=120)
    assert reply.status_code == 429
    assert reply.json()["error"]["code"] == "queue_full"
    assert int(reply.headers["Retry-After"]) >= 1
    wait_until(
        lambda: total(served.get("/metrics").text, "pagedcore_open_requests", state="running") == 0, 120, "the other prompts ended too"
    )


def test_only_the_worker_loads_torch(served: Served) -> None:
    assert len(served.pids()) > 1
    assert len(served.loads("libtorch")) == 1


# ---- one catalogue


def questions() -> list[str]:
    stem = "You are a patient teacher who explains each step of the answer in plain words before giving it. "
    return [stem + QUESTION, stem + "What is two plus two?", QUESTION, stem + QUESTION, "Name a colour."]


COMPARED_COUNTERS = (
    "pagedcore_page_lookups_total",
    "pagedcore_page_hits_total",
    "pagedcore_prefix_cache_queries_tokens_total",
    "pagedcore_prefix_cache_hit_tokens_total",
    "pagedcore_pool_acquired_blocks_total",
    "pagedcore_pool_ghost_hits_total",
    "pagedcore_cache_miss_blocks_total",
    "pagedcore_prompt_tokens_total",
    "pagedcore_generation_tokens_total",
    "pagedcore_cache_hit_rate",
)


def scrape_when_done(served: Served) -> str:
    def is_done() -> bool:
        return total(served.get("/metrics").text, "pagedcore_requests_total", status="completed") == len(questions())

    wait_until(is_done, 60, "all requests in /metrics")
    return served.get("/metrics").text


def scrape_langchain(tmp_path: Path) -> str:
    port = free_port()
    arguments = [str(SUPPORT / "langchain_app.py"), str(port), json.dumps(CONFIG), json.dumps(questions()), "6"]
    with serve(arguments, tmp_path / "langchain.log", port=port, ready_path="/metrics") as served:
        return scrape_when_done(served)


def scrape_server(kind: str, tmp_path: Path) -> str:
    with SERVERS[kind](tmp_path) as served:
        for question in questions():
            chat(served, question, max_tokens=6)
        text = scrape_when_done(served)
        assert served.terminate() == 0
        wait_until(lambda: not served.pids(), 60, "no process left")
    return text


@pytest.mark.timeout(600)
def test_the_same_traffic_shows_the_same_numbers_through_each_door_and_sigterm_leaves_nothing(tmp_path: Path) -> None:
    scrapes = {kind: scrape_server(kind, tmp_path) for kind in SERVERS} | {"langchain": scrape_langchain(tmp_path)}
    kinds = {door: _families(text) for door, text in scrapes.items()}
    assert kinds["litserve"] == kinds["bentoml"] == kinds["langchain"]
    assert len(kinds["litserve"]) > 40
    series = {door: set(samples(text)) for door, text in scrapes.items()}
    assert series["litserve"] == series["bentoml"] == series["langchain"]
    counters = {door: {key: value for key, value in samples(text).items() if key[0] in COMPARED_COUNTERS} for door, text in scrapes.items()}
    assert counters["litserve"] == counters["bentoml"] == counters["langchain"]
    assert total(scrapes["litserve"], "pagedcore_prefix_cache_hit_tokens_total") > 0
    for door, text in scrapes.items():
        assert total(text, "pagedcore_requests_total", adapter=door) == len(questions())
        assert total(text, "pagedcore_requests_total") == len(questions())
        hits, queries = total(text, "pagedcore_prefix_cache_hit_tokens_total"), total(text, "pagedcore_prefix_cache_queries_tokens_total")
        shown = [line for line in text.splitlines() if "cache_hit_rate" in line][-1]
        assert float(shown.split()[-1]) == hits / queries, "what a script that greps the name prints"


def _families(text: str) -> dict[str, str]:
    """Those with samples: one that a machine has nothing for stands in the text of a plain process, without any."""
    families = [family for family in text_string_to_metric_families(text) if family.samples]
    return {family.name: family.type for family in families if family.name.startswith("pagedcore_")}


# ---- LangChain


@pytest.fixture(scope="module")
def engine_config() -> Iterator[EngineConfig]:
    config = EngineConfig(**{**CONFIG, "max_waiting_requests": None, "metrics_instance": "langchain-tests"})
    yield config
    close_shared_engines()


def test_a_chat_model_answers_in_every_form(engine_config: EngineConfig) -> None:
    chain = ChatPromptTemplate.from_template("What is the capital of {country}?") | ChatPagedCore(
        engine_config=engine_config, temperature=0, max_tokens=20
    )
    text_chain = chain | StrOutputParser()
    asked = {"country": "France"}

    async def asynchronous() -> list[str]:
        whole = await text_chain.ainvoke(asked)
        streamed = "".join([piece async for piece in text_chain.astream(asked)])
        return [whole, streamed, *await text_chain.abatch([asked, asked])]

    answers = [text_chain.invoke(asked), "".join(text_chain.stream(asked)), *text_chain.batch([asked, asked]), *asyncio.run(asynchronous())]
    assert len(set(answers)) == 1
    assert "Paris" in answers[0]
    assert chain.invoke(asked).usage_metadata["input_token_details"] == {"cache_read": 32}


def test_a_batch_of_64_shares_engine_steps(engine_config: EngineConfig) -> None:
    model = PagedCoreLLM(engine_config=engine_config, temperature=0, max_tokens=4)
    before = model.stats()
    replies = model.batch([f"{n} plus {n} is" for n in range(64)])
    during = model.stats() - before
    assert len(replies) == 64
    assert during.num_finished["completed"] == 64
    assert during.num_steps < 64  # sixteen run at once: alone each would need four


def test_a_stream_left_early_frees_the_engine(engine_config: EngineConfig) -> None:
    model = PagedCoreLLM(engine_config=engine_config, max_tokens=1900, model_kwargs={"ignore_eos": True})
    before = model.stats()
    stream = model.stream("Once upon a time")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    wait_until(lambda: (model.stats() - before).num_finished.get("aborted") == 1, 60, "the abort")
    assert model.stats().num_running == 0


def test_several_doors_of_one_process_share_an_engine(engine_config: EngineConfig) -> None:
    engine = shared_engine(engine_config)
    chat_model = ChatPagedCore(engine=engine, temperature=0, max_tokens=8)
    text_model = PagedCoreLLM(engine_config=engine_config, temperature=0, max_tokens=8)
    before = engine.stats()
    prompt = "A sentence that is long enough to fill a block of sixteen tokens, and then to go on for a little while more."
    text_model.invoke(prompt)
    text_model.invoke(prompt)
    chat_model.invoke("hi")
    assert asyncio.run(_generate(engine, prompt)) == text_model.invoke(prompt)
    during = engine.stats() - before
    assert during.num_finished["completed"] == 5
    assert during.prefix_cache_hit_tokens >= 3 * 16


async def _generate(engine: AsyncEngine, prompt: str) -> str:
    async for output in engine.generate(prompt, SamplingParams(temperature=0, max_tokens=8)):
        text = output.outputs[0].text
    return text
