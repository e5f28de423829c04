"""Requests to a server from processes of their own, so that their clients never wait for the engine's or each other's Python."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from pagedcore.commands.bench.online_stream import Endpoint, Stream, stream_completion
from pagedcore.commands.bench.workloads import BenchRequest
from pagedcore.errors import EngineError

START_DELAY_S = 0.2
"""All processes start at one moment, which is so far ahead that each has heard of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to make."""

    due_s: float
    """Seconds after the start."""
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One request that has ended."""

    due_s: float
    """On the clock of its stream: when it was to be sent; with a limit of requests in flight, when its turn came."""
    stream: Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one client process does."""

    endpoint: Endpoint
    calls: Sequence[Call]
    concurrency: int | None
    """Requests that it keeps in flight at most; None has no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one client process saw."""

    answered: Sequence[Answered] = ()
    failures: Sequence[str] = ()
    cpu_fraction: float = 0.0
    """Of one core, while it ran: near 1 the client is what was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineRound:
    """One round over all processes."""

    answered: Sequence[Answered] = field(repr=False)
    client_cpu_fraction: float
    """Of the busiest process."""


def make_calls(requests: Sequence[BenchRequest], options: dict[str, Any], rate: float | None, seed: int | str) -> list[Call]:
    """Bodies of /v1/completions and when they are due: at once, or with exponential gaps of 1 / rate seconds on average."""
    draw, due_s, calls = random.Random(seed), 0.0, []
    for request in requests:
        if rate is not None:
            due_s += draw.expovariate(rate)
        body = {**options, "prompt": request.prompt, "max_tokens": request.num_output_tokens, "stream": True, "ignore_eos": True}
        calls.append(Call(due_s=due_s, body=json.dumps(body).encode()))
    return calls


def deal(endpoint: Endpoint, calls: Sequence[Call], concurrency: int | None, num_processes: int) -> list[Share]:
    """Calls in turn to at most so many processes, each with its part of the requests in flight."""
    count = min(num_processes, len(calls), concurrency or len(calls))
    limits = [None if concurrency is None else (concurrency + index) // count for index in range(count)]
    return [Share(endpoint=endpoint, calls=calls[index::count], concurrency=limit) for index, limit in enumerate(limits)]


def run_online(shares: Sequence[Share]) -> OnlineRound:
    """Start a process for each share, let all begin at one moment, wait for all. Raises `EngineError` where requests failed."""
    context = multiprocessing.get_context("spawn")
    clients = []
    for share in shares:
        here, there = context.Pipe()
        process = context.Process(target=run_client, args=(share, there), daemon=True)
        process.start()
        there.close()
        clients.append((process, here))
    try:
        for _, pipe in clients:
            pipe.recv()
        start_s = time.monotonic() + START_DELAY_S
        for _, pipe in clients:
            pipe.send(start_s)
        reports = [pipe.recv() for _, pipe in clients]
    except EOFError as error:
        raise EngineError("A client process of the benchmark ended by itself; its message is above.") from error
    finally:
        for process, pipe in clients:
            pipe.close()
            process.terminate()
            process.join()
    return _round(reports)


def run_client(share: Share, pipe: Connection) -> None:
    """The main function of a client process: say that it is there, hear when to begin, send back what it saw.

    Ctrl-C reaches every process of a terminal; the one that started this ends it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe.send("ready")
    pipe.send(asyncio.run(run_share(share, pipe.recv())))


async def run_share(share: Share, start_s: float) -> Report:
    """Make the calls, each at its time after `start_s`, and as many at a time as the share says."""
    gate = asyncio.Semaphore(share.concurrency or len(share.calls))
    await asyncio.sleep(max(0.0, start_s - time.monotonic()))
    cpu_s = time.process_time()
    ended = await asyncio.gather(*(_call(share, call, gate, start_s) for call in share.calls), return_exceptions=True)
    wall_s = time.monotonic() - start_s
    unexpected = [error for error in ended if isinstance(error, BaseException) and not isinstance(error, EngineError)]
    if unexpected:
        raise unexpected[0]
    return Report(
        answered=[one for one in ended if isinstance(one, Answered)],
        failures=[str(error) for error in ended if isinstance(error, EngineError)],
        cpu_fraction=(time.process_time() - cpu_s) / wall_s,
    )


async def _call(share: Share, call: Call, gate: asyncio.Semaphore, start_s: float) -> Answered:
    due_s = start_s + call.due_s
    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    async with gate:
        if share.concurrency is not None:
            due_s = time.monotonic()
        return Answered(due_s=due_s, stream=await stream_completion(share.endpoint, call.body))


def _round(reports: Sequence[Report]) -> OnlineRound:
    failures = [failure for report in reports for failure in report.failures]
    answered = [one for report in reports for one in report.answered]
    if failures:
        raise EngineError(f"{len(failures)} of {len(failures) + len(answered)} requests failed; the first: {failures[0]}")
    return OnlineRound(answered=answered, client_cpu_fraction=max(report.cpu_fraction for report in reports))
