"""`pagedcore bench serve`: streams read off a socket, and the arithmetic of what came when."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.commands.bench import local_server
from pagedcore.commands.bench.lengths import Lengths
from pagedcore.commands.bench.local_server import engine_arguments
from pagedcore.commands.bench.online_load import Answered, Call, OnlineRound, Share, deal, make_calls, run_online, run_share
from pagedcore.commands.bench.online_stream import ChunkedBody, Endpoint, EventLines, Stream, stream_completion
from pagedcore.commands.bench.serve import (
    ServeWork,
    end_to_end_s,
    first_token_s,
    inter_token_s,
    measure_serve,
    num_tokens,
    settled_inter_token_s,
    tokens_per_s,
)
from pagedcore.commands.bench.serve_run import first_model
from pagedcore.commands.bench.spread import Spread
from pagedcore.commands.bench.workloads import BenchRequest, Load
from pagedcore.commands.flags import engine_flags
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError, EngineError, MissingExtraError

ENDPOINT = Endpoint(url="http://server", model="m")


def event(text: str = "", *, count: int | None = None, finish: str | None = None) -> bytes:
    usage = None if count is None else {"completion_tokens": count}
    return json.dumps({"choices": [{"text": text, "finish_reason": finish}], "usage": usage}).encode()


def usage(count: int) -> bytes:
    return json.dumps({"choices": [], "usage": {"completion_tokens": count}}).encode()


def sse(*events: bytes) -> bytes:
    return b"".join(b"data: " + each + b"\n\n" for each in events)


def chunked(data: bytes, size: int) -> bytes:
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    return b"".join(f"{len(piece):x};note=1\r\n".encode() + piece + b"\r\n" for piece in pieces) + b"0\r\n\r\n"


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(st.lists(st.integers(0, 10_000), max_size=12), st.integers(1, 30))
def test_events_are_the_same_wherever_the_bytes_are_cut(places: list[int], chunk_size: int) -> None:
    events = [event("Par"), b": no event", event("is", finish="length"), usage(2), b"[DONE]"]
    data = b": a comment\r\n\r\n" + sse(*events)
    body, lines = ChunkedBody(), EventLines()
    read = [one for piece in cut(chunked(data, chunk_size), places) for one in lines.push(body.push(piece))]
    assert read == events


def test_an_arrival_is_a_read_with_new_tokens_whatever_their_number() -> None:
    stream = Stream(0.0)
    stream.take([event("a"), event("b")], 1.0)
    stream.take([], 2.0)
    stream.take([event("")], 3.0)
    stream.take([event("", finish="length")], 4.0)
    stream.take([usage(3), b"[DONE]"], 5.0)
    assert stream.arrivals == [(1.0, None), (4.0, None)]
    assert stream.num_tokens == 3
    assert stream.is_done


def test_tokens_without_text_are_an_arrival_where_the_server_counts_in_every_event() -> None:
    stream = Stream(0.0)
    stream.take([event("", count=1)], 1.0)
    stream.take([event("", count=1)], 2.0)
    stream.take([event("x", count=4)], 3.0)
    assert stream.arrivals == [(1.0, 1), (3.0, 4)]


def test_an_error_in_a_stream_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"The server failed a request: .*no room"):
        Stream(0.0).take([json.dumps({"error": {"message": "no room"}}).encode()], 1.0)


def answered(due_s: float, arrivals: list[tuple[float, int | None]], tokens: int) -> Answered:
    return Answered(due_s=due_s, stream=Stream(due_s + 0.5, arrivals, tokens, True))


ROUND = OnlineRound(
    answered=[answered(10.0, [(12.0, None), (13.0, None), (16.0, None)], 6), answered(11.0, [(15.0, 1), (18.0, 4), (20.0, 5)], 5)],
    client_cpu_fraction=0.25,
)


def test_times_count_from_when_a_request_was_due() -> None:
    assert first_token_s(ROUND) == [2.0, 4.0]
    assert end_to_end_s(ROUND) == [6.0, 9.0]


def test_throughput_lasts_from_the_first_due_request_to_the_last_token() -> None:
    assert num_tokens(ROUND) == 11
    assert tokens_per_s(ROUND) == 1.1


def test_inter_token_times_are_gaps_over_the_tokens_that_came() -> None:
    # the first stream's mean is 2 tokens an arrival; the second says its counts
    assert inter_token_s(ROUND) == [(0.5, 2.0), (1.5, 2.0), (1.0, 3.0), (2.0, 1.0)]


def test_settled_are_the_inter_token_times_that_began_after_the_last_first_token() -> None:
    # the second stream has its first token at 15.0
    assert settled_inter_token_s(ROUND) == [(1.0, 3.0), (2.0, 1.0)]
    assert settled_inter_token_s(OnlineRound(answered=[answered(0.0, [(1.0, 1)], 1)], client_cpu_fraction=0.0)) == []


def test_a_gap_that_brought_nothing_counts_for_nothing() -> None:
    same = OnlineRound(answered=[answered(0.0, [(1.0, 1), (2.0, 1), (4.0, 2)], 2)], client_cpu_fraction=0.0)
    assert inter_token_s(same) == [(2.0, 1.0)]


def requests(count: int) -> list[BenchRequest]:
    return [BenchRequest(prompt=[number], num_output_tokens=number + 1) for number in range(count)]


def test_a_call_says_exactly_what_is_asked() -> None:
    (call,) = make_calls([BenchRequest(prompt=[5, 6], num_output_tokens=7)], {"model": "m"}, None, 0)
    assert json.loads(call.body) == {"model": "m", "prompt": [5, 6], "max_tokens": 7, "stream": True, "ignore_eos": True}
    assert call.due_s == 0.0


def test_arrivals_at_a_rate_have_its_mean_gap_and_the_same_times_for_the_same_seed() -> None:
    calls = make_calls(requests(4000), {}, 50.0, 1)
    assert calls == make_calls(requests(4000), {}, 50.0, 1)
    times = [call.due_s for call in calls]
    assert times == sorted(times)
    assert times[-1] / 4000 == pytest.approx(1 / 50, rel=0.05)
    assert {call.due_s for call in make_calls(requests(3), {}, None, 1)} == {0.0}


@pytest.mark.parametrize(
    ("num_calls", "concurrency", "limits"),
    [(10, None, [None] * 4), (2, None, [None] * 2), (10, 1, [1]), (10, 6, [1, 1, 2, 2]), (2, 8, [4, 4])],
)
def test_processes_share_the_calls_and_the_number_in_flight(num_calls: int, concurrency: int | None, limits: list[int | None]) -> None:
    calls = make_calls(requests(num_calls), {}, None, 0)
    shares = deal(ENDPOINT, calls, concurrency, 4)
    assert [share.concurrency for share in shares] == limits
    assert sorted(call.body for share in shares for call in share.calls) == sorted(call.body for call in calls)


def test_no_two_rounds_and_no_warm_up_have_a_prompt_in_common() -> None:
    seen: list[set[str]] = []
    caps: list[int] = []

    def run(shares: Sequence[Share]) -> OnlineRound:
        bodies = [json.loads(call.body) for share in shares for call in share.calls]
        seen.append({str(body["prompt"]) for body in bodies})
        caps.append(max(body["max_tokens"] for body in bodies))
        assert all(body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True} for body in bodies)
        return ROUND

    load = Load(num_prompts=0, prompt_tokens=Lengths(6, 6), output_tokens=Lengths(20, 20))
    work = ServeWork(load=load, num_prompts=None, concurrency=[1, 2], counts_each=True, rounds=2)
    points = measure_serve(ENDPOINT, work, run, lambda *_: None)
    assert [len(prompts) for prompts in seen] == [4, 4, 4, 8, 8, 8]
    assert len(set().union(*seen)) == 36
    assert caps == [8, 20, 20, 8, 20, 20], "a warm-up is short"
    assert [point["load"] for point in points] == ["1 in flight", "2 in flight"]
    assert points[0]["output_tokens_per_s"] == Spread(1.1, (1.1, 1.1))
    assert points[0]["first_token_p99_ms"] == Spread(4000.0, (4000.0, 4000.0))
    assert points[0]["inter_token_p50_ms"] == Spread(1000.0, (1000.0, 1000.0))
    assert points[0]["settled_inter_token_p99_ms"] == Spread(2000.0, (2000.0, 2000.0))
    assert points[0]["end_to_end_p50_s"] == Spread(6.0, (6.0, 6.0))
    assert points[0]["client_late_p99_ms"] == Spread(500.0, (500.0, 500.0))


def test_rates_and_all_at_once_are_loads_of_their_own() -> None:
    load = Load(num_prompts=0, prompt_tokens=Lengths(1, 1), output_tokens=Lengths(1, 1))
    rates = ServeWork(load=load, num_prompts=None, rates=[2.0, 4.5]).arrivals()
    assert [(str(one), one.num_prompts) for one in rates] == [("2 a second", 64), ("4.5 a second", 64)]
    (at_once,) = ServeWork(load=load, num_prompts=256).arrivals()
    assert (str(at_once), at_once.num_prompts) == ("256 at once", 256)


# ---- against a socket

Answer = Callable[[asyncio.StreamWriter, dict[str, Any]], Awaitable[None]]


class TinyServer:
    """Answers each request by `answer`; remembers heads and bodies, and how many were open at a time."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.heads: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.num_open = self.max_open = 0

    async def __aenter__(self) -> TinyServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = Endpoint(url=f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/base/", model="m", api_key="k")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
        self.heads.append(head)
        self.bodies.append(json.loads(await reader.readexactly(length)))
        await self.answer(writer, self.bodies[-1])
        self.num_open -= 1
        writer.close()
        await writer.wait_closed()


def head(status: str = "200 OK", *fields: str) -> bytes:
    return ("\r\n".join([f"HTTP/1.1 {status}", *fields]) + "\r\n\r\n").encode()


async def answer_well(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    writer.write(head("200 OK", "transfer-encoding: Chunked"))
    tokens = [event("x") for _ in range(body["max_tokens"])]
    writer.write(chunked(sse(*tokens, usage(body["max_tokens"]), b"[DONE]"), 50))


async def answer_until_closed(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    writer.write(head() + sse(event("x"), usage(1), b"[DONE]"))


async def answer_busy(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    writer.write(head("429 Too Many Requests", "Content-Length: 9") + b"try later")


async def answer_half(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    writer.write(head() + sse(event("x")))


async def answer_uncounted(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    writer.write(head() + sse(event("x"), b"[DONE]"))


BODY = json.dumps({"max_tokens": 3}).encode()


@pytest.mark.asyncio
async def test_a_stream_is_read_to_its_end_and_counted_by_usage() -> None:
    async with TinyServer(answer_well) as server:
        stream = await stream_completion(server.endpoint, BODY)
    assert stream.num_tokens == 3
    assert stream.sent_s <= stream.arrivals[0][0] <= stream.arrivals[-1][0] <= time.monotonic()
    assert server.heads[0].startswith("POST /base/v1/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer k\r\n" in server.heads[0]
    assert server.bodies == [{"max_tokens": 3}]


@pytest.mark.asyncio
async def test_a_body_that_ends_with_its_connection_is_read_too() -> None:
    async with TinyServer(answer_until_closed) as server:
        assert (await stream_completion(server.endpoint, BODY)).num_tokens == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (answer_busy, "The server answered a request with HTTP 429: try later"),
        (answer_half, "ended a stream early"),
        (answer_uncounted, r"sent no usage, though stream_options\.include_usage asks for it"),
    ],
)
async def test_a_reply_that_is_no_whole_stream_is_an_error(answer: Answer, message: str) -> None:
    async with TinyServer(answer) as server:
        with pytest.raises(EngineError, match=message):
            await stream_completion(server.endpoint, BODY)


@pytest.mark.asyncio
async def test_a_client_process_keeps_to_its_number_in_flight() -> None:
    async with TinyServer(answer_well) as server:
        calls = [Call(due_s=0.0, body=BODY) for _ in range(9)]
        report = await run_share(Share(endpoint=server.endpoint, calls=calls, concurrency=2), time.monotonic())
    assert len(report.answered) == 9
    assert server.max_open <= 2
    assert not report.failures
    assert all(one.due_s <= one.stream.sent_s for one in report.answered)


@pytest.mark.asyncio
async def test_with_a_number_in_flight_a_request_is_due_when_its_turn_comes() -> None:
    async with TinyServer(answer_well) as server:
        calls = [Call(due_s=0.0, body=BODY) for _ in range(3)]
        report = await run_share(Share(endpoint=server.endpoint, calls=calls, concurrency=1), time.monotonic())
    first, second, third = report.answered
    assert first.stream.arrivals[-1][0] <= second.due_s
    assert second.stream.arrivals[-1][0] <= third.due_s


@pytest.mark.asyncio
async def test_two_client_processes_bring_back_what_they_saw() -> None:
    async with TinyServer(answer_well) as server:
        calls = [Call(due_s=0.0, body=BODY) for _ in range(5)]
        result = await asyncio.to_thread(run_online, deal(server.endpoint, calls, None, 2))
    assert num_tokens(result) == 15
    assert result.client_cpu_fraction > 0


@pytest.mark.asyncio
async def test_failed_requests_make_no_numbers() -> None:
    async with TinyServer(answer_busy) as server:
        shares = deal(server.endpoint, [Call(due_s=0.0, body=BODY) for _ in range(3)], None, 1)
        with pytest.raises(EngineError, match="3 of 3 requests failed; the first: The server answered a request with HTTP 429"):
            await asyncio.to_thread(run_online, shares)


def test_a_server_that_is_not_there_is_said_by_its_address() -> None:
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9/v1/models names no model"):
        first_model("http://127.0.0.1:9", None)


# ---- a server of our own


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": "m", "max_num_seqs": 4, "enable_prefix_caching": False, "enforce_eager": True, "gpu_memory_utilization": 0.5},
        {"served_model_name": ("a", "b"), "overlap": False, "max_model_len": 512},
        {"overlap": True, "load_format": "dummy", "skip_tokenizer_init": True},
    ],
)
def test_a_server_of_ours_gets_the_config_it_is_measured_with(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedcore import cli

    built: list[EngineConfig] = []
    flags = {flag.name for flag in engine_flags()}
    arguments = engine_arguments(EngineConfig(**options))
    assert {argument for argument in arguments if argument.startswith("--") and not argument.startswith("--no-")} <= flags
    monkeypatch.setattr("pagedcore.commands.one_shot.complete", lambda config, *_, **__: built.append(config) or _stop())
    with pytest.raises(SystemExit):
        cli.main(["generate", "hi", *arguments])
    assert built == [EngineConfig(**options)]


def _stop() -> None:
    raise SystemExit(0)


def test_without_litserve_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[litserve\]"), local_server.local_server(EngineConfig()):
        pass
