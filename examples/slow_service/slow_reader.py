"""A client that reads slowly: its clock says that the service is slow, and the engine was done long ago.

Transport is the client's time minus the engine's. Nobody else is held up: the engine waits for no reader, and the blocks of a request
are free when it ends. The cure is the client's: read as fast as it comes, and do the slow work with all that has come since.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import chain
from urllib.parse import urlsplit

from stage import Facts, Scene, Stage, Story, main

from pagedcore import SamplingParams

NUM_TOKENS = 32
TOKENS_PER_WRITE = 3
"""The client stores what it reads. A write takes as long as the engine takes for so many tokens, be it one token or ten."""

Client = Callable[[Iterator[str]], Iterator[list[str]]]
"""From the texts that come to the pieces that are stored."""


def each_by_itself(texts: Iterator[str]) -> Iterator[list[str]]:
    """Read a token, store it, read the next."""
    for text in texts:
        yield [text]


def what_has_come(texts: Iterator[str]) -> Iterator[list[str]]:
    """A thread reads; what has come while the last piece was stored is one piece."""
    come: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_put_all, args=(texts, come), name="reader").start()
    piece: list[str] = []
    while (text := come.get()) is not None:
        piece.append(text)
        if come.empty():
            yield piece
            piece = []
    yield piece


def _put_all(texts: Iterator[str], come: queue.SimpleQueue[str | None]) -> None:
    for text in chain(texts, (None,)):
        come.put(text)


def texts_of(url: str, request_id: str) -> Iterator[str]:
    """The tokens of a streamed completion as they come."""
    body = {
        "prompt": "A long letter to the harbour office:",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    with closing(http.client.HTTPConnection(urlsplit(url).netloc)) as connection:
        connection.request("POST", "/v1/completions", json.dumps({"model": "SmolLM2-135M-Instruct", **body}), headers)
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                yield from (choice["text"] for choice in json.loads(line[6:])["choices"])


def play(stage: Stage, client: Client) -> Facts:
    engine, stored = stage.llm.engine, [0, 0]
    write_s = TOKENS_PER_WRITE * _seconds_per_token(stage)
    pieces = client(texts_of(stage.url, "letter"))
    began_s = time.monotonic()
    thread = threading.Thread(target=_store_all, args=(pieces, write_s, stored), name="client")
    thread.start()
    while (engine.history.find("letter") or {}).get("e2e_ms") is None:
        time.sleep(0.01)
    stats, (num_stored, _) = engine.stats(), stored
    thread.join()
    client_s, engine_s = time.monotonic() - began_s, (engine.history.find("letter") or {})["e2e_ms"] / 1000
    return {
        "client's time (s)": client_s,
        "engine's time (s)": engine_s,
        "transport: the difference (s)": client_s - engine_s,
        "time of a write (ms)": 1000 * write_s,
        "writes": stored[1],
        "tokens stored when the engine was done": num_stored,
        "requests that ran then": stats.num_running,
        "blocks in use then": stats.num_active_blocks,
    }


def _seconds_per_token(stage: Stage) -> float:
    stage.llm.generate("Ships in the harbour:", SamplingParams(max_tokens=12, ignore_eos=True))
    (record,) = stage.llm.engine.history.recent(1)
    return float(record["decode_latency_ms_per_token"]) / 1000


def _store_all(pieces: Iterator[list[str]], write_s: float, stored: list[int]) -> None:
    """Counts tokens and writes in `stored`."""
    for piece in pieces:
        time.sleep(write_s)
        stored[0] += len(piece)
        stored[1] += 1


STORY = Story(
    "A client that reads slowly",
    before=Scene("a token, a write", {}, partial(play, client=each_by_itself)),
    after=Scene("what has come, a write", {}, partial(play, client=what_has_come)),
)

if __name__ == "__main__":
    main(STORY)
