"""What the HTTP front costs, without a model: streams through our routes and through a plain FastAPI route, in one run.

Each server is a process of its own over an engine that gives every running request one token a step; the clients are other processes.
Ours detokenizes (a made-up vocabulary), counts usage and watches for disconnects; the plain one writes a line of JSON for each token and
nothing else. `us a token` is processor time of the server process, both its kernel's and its own.

usage: python bench/http_front.py [--streams 256] [--step-ms 10] [--rounds 3] [--only ours plain] [--http h11 --loop asyncio]
       python bench/http_front.py --make-tokenizer FOLDER --vocab-size 151936
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from pagedcore.client import ModelInfo, RequestContext
from pagedcore.commands.bench.lengths import Lengths
from pagedcore.commands.bench.local_server import _free_port, _wait_until_ready
from pagedcore.commands.bench.online_load import Call, OnlineRound, deal, make_calls, run_online
from pagedcore.commands.bench.online_stream import Endpoint
from pagedcore.commands.bench.serve import first_token_s, inter_token_s, num_tokens, tokens_per_s
from pagedcore.commands.bench.spread import percentile, weighted_percentile
from pagedcore.commands.bench.workloads import Load
from pagedcore.commands.http_front import BACKLOG
from pagedcore.front import Front
from pagedcore.garbage import GarbageHold
from pagedcore.messages import AddRequest, InboxMessage, RequestUpdate
from pagedcore.openai import build_app
from pagedcore.outputs import RequestOutput
from pagedcore.sampling_params import SamplingParams
from pagedcore.text.tokenizer import Tokenizer, load_tokenizer

VOCAB_SIZE = 32_000
KINDS = ("ours", "plain")
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


class SteppingEngine:
    """Owns the running requests and a thread that gives each of them one token every `step_s`."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._running: dict[str, int] = {}
        self._lock = threading.Lock()
        self._draw = random.Random(0)
        self.deliver: Callable[[list[RequestUpdate]], None]
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def send(self, message: InboxMessage) -> None:
        with self._lock:
            if isinstance(message, AddRequest):
                self._running[message.request_id] = message.params.max_tokens or 16
                return
            if self._running.pop(message.request_id, None) is None:
                return
        end = RequestUpdate(request_id=message.request_id, new_token_ids=[], finish_reason="abort", status="aborted")
        self.deliver([end])

    def _run(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + self._step_s, time.monotonic())
            time.sleep(max(0.0, due_s - time.monotonic()))
            with self._lock:
                updates = [self._update(request_id, left) for request_id, left in list(self._running.items())]
            if updates:
                self.deliver(updates)

    def _update(self, request_id: str, num_left: int) -> RequestUpdate:
        token_ids = [self._draw.randrange(256, 4096)]
        if num_left > 1:
            self._running[request_id] = num_left - 1
            return RequestUpdate(request_id=request_id, new_token_ids=token_ids)
        del self._running[request_id]
        return RequestUpdate(request_id=request_id, new_token_ids=token_ids, finish_reason="length", status="completed")


class SteppingClient:
    """An `EngineClient` of the real front over a `SteppingEngine`."""

    def __init__(self, step_s: float, text: Tokenizer, *, vocab_size: int = VOCAB_SIZE, max_model_len: int = 100_000) -> None:
        self.info = ModelInfo(model_names=("bench",), max_model_len=max_model_len, created_s=0, vocab_size=vocab_size)
        self.text = text
        engine = SteppingEngine(step_s)
        self._front = Front(self.info, text, engine.send)
        engine.deliver = self._front.deliver

    def generate(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        context: RequestContext | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        return self._front.generate(prompt, params, request_id, context=context, add_special_tokens=add_special_tokens)

    async def abort(self, request_id: str) -> None:
        await self._front.abort(request_id)

    async def is_ready(self) -> bool:
        return True

    async def is_alive(self) -> bool:
        return True

    async def metrics_text(self, accept: str = "") -> tuple[bytes, str]:
        return b"", "text/plain"

    async def inspect(self, question: str, **arguments: Any) -> list[dict[str, Any]]:
        return []


def make_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Every byte, and made-up words of two to eight letters. What the folder of a model's shape lacks for `pagedcore serve`."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    draw = random.Random(1)
    vocab = {piece: index for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    while len(vocab) < vocab_size:
        vocab.setdefault("Ġ" * draw.randrange(2) + "".join(draw.choices("etaoinshrdlu", k=draw.randrange(2, 9))), len(vocab))
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def make_app(kind: str, step_s: float, text: Tokenizer) -> FastAPI:
    return build_app(SteppingClient(step_s, text)) if kind == "ours" else make_plain_app(step_s)


def make_plain_app(step_s: float) -> FastAPI:
    """A route as people write it first: a queue for each request, one write for each token."""
    app = FastAPI()
    queues: dict[str, asyncio.Queue[RequestUpdate]] = {}
    engine = SteppingEngine(step_s)

    def put(updates: list[RequestUpdate]) -> None:
        for update in updates:
            queues[update.request_id].put_nowait(update)

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        loop = asyncio.get_running_loop()
        engine.deliver = lambda updates: loop.call_soon_threadsafe(put, updates) and None
        return {"status": "ready"}

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        request_id = f"request-{time.monotonic_ns()}"
        queues[request_id] = asyncio.Queue()
        params = SamplingParams(max_tokens=body["max_tokens"])
        engine.send(_plain_request(request_id, params))
        return StreamingResponse(lines(request_id, body["max_tokens"]), media_type="text/event-stream")

    async def lines(request_id: str, num_tokens: int) -> AsyncIterator[str]:
        reason = None
        while reason is None:
            update = await queues[request_id].get()
            reason = update.finish_reason
            choice = {"index": 0, "text": f"t{update.new_token_ids[0]} ", "finish_reason": reason}
            yield "data: " + json.dumps({"id": request_id, "object": "text_completion", "model": "bench", "choices": [choice]}) + "\n\n"
        del queues[request_id]
        yield "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": num_tokens}}) + "\n\ndata: [DONE]\n\n"

    return app


def _plain_request(request_id: str, params: SamplingParams) -> AddRequest:
    return AddRequest(request_id=request_id, group_id=request_id, prompt_token_ids=[], params=params, arrival_s=0.0)


def serve(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        app = make_app(args.serve, args.step_ms / 1000, make_tokenizer(Path(folder)))
    hold = GarbageHold()
    hold.take()  # as a front does when it is ready
    uvicorn.run(app, port=args.port, log_level="warning", access_log=False, backlog=BACKLOG, http=args.http, loop=args.loop)


@contextmanager
def served(kind: str, args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """URL and process id of a server."""
    port = _free_port()
    command = [sys.executable, __file__, "--serve", kind, "--port", str(port), "--step-ms", str(args.step_ms)]
    command += ["--http", args.http, "--loop", args.loop]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}", process, Path(log.name))
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait(30)


def cpu_s(pid: int) -> float:
    """Processor seconds of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND


def compare(args: argparse.Namespace) -> None:
    """All servers stand from the beginning to the end; rounds go round them, so that what else the machine does meets all alike."""
    print(f"{args.streams} streams at once, a step of {args.step_ms:g} ms, {args.output_tokens} tokens each, {os.cpu_count()} cores")
    print(f"{'':<7}{'tok/s':>9}{'us a token':>12}{'tok a read':>12}{'TTFT p50':>10}{'p99':>8}{'ITL p50':>10}{'p99 ms':>8}{'client':>9}")
    calls = make_timed_calls(args)
    with ExitStack() as servers:
        served_by = {kind: servers.enter_context(served(kind, args)) for kind in args.only}
        for number in range(args.rounds + 1):
            for kind, (url, pid) in served_by.items():
                before_s = cpu_s(pid)
                result = run_online(deal(Endpoint(url=url, model="bench"), calls, None, args.client_processes))
                if number:  # the first round is a warm-up
                    print(row(kind, result, cpu_s(pid) - before_s), flush=True)


def make_timed_calls(args: argparse.Namespace) -> list[Call]:
    load = Load(
        num_prompts=args.streams,
        prompt_tokens=Lengths.parse(args.prompt_tokens, "--prompt-tokens"),
        output_tokens=Lengths.parse(args.output_tokens, "--output-tokens"),
    )
    return make_calls(load.requests(10_000), {"model": "bench", "stream_options": {"include_usage": True}}, None, 0)


def row(kind: str, result: OnlineRound, server_cpu_s: float) -> str:
    count = num_tokens(result)
    events = sum(len(one.stream.arrivals) for one in result.answered)
    first, gaps = first_token_s(result), inter_token_s(result)
    return (
        f"{kind:<7}{tokens_per_s(result):>9,.0f}{1e6 * server_cpu_s / count:>12.1f}{count / events:>12.2f}"
        f"{1e3 * percentile(first, 0.5):>10.0f}{1e3 * percentile(first, 0.99):>8.0f}"
        f"{1e3 * weighted_percentile(gaps, 0.5):>10.1f}{1e3 * weighted_percentile(gaps, 0.99):>8.1f}{result.client_cpu_fraction:>9.2f}"
    )


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256, help="streams opened at once")
    parser.add_argument("--prompt-tokens", default="100-1024")
    parser.add_argument("--output-tokens", default="100-1024")
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of an engine step: every running stream gets one token")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client-processes", type=int, default=1)
    parser.add_argument("--http", choices=("auto", "h11", "httptools"), default="auto", help="how uvicorn reads and writes HTTP")
    parser.add_argument("--loop", choices=("auto", "asyncio", "uvloop"), default="auto", help="its event loop")
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--make-tokenizer", type=Path, metavar="FOLDER", help="write a made-up tokenizer.json there, and nothing else")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make_tokenizer:
        make_tokenizer(args.make_tokenizer, args.vocab_size)
    elif args.serve:
        serve(args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
