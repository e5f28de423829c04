"""How long the HTTP front's event loop stands still while a prompt of 5 MB is read: as text, as a chat of one message and of a hundred
thousand, as a million token ids, and as a text that is far too long for the model.

The engine is made up and the tokenizer is the embedded model's. `longest` is the longest time between two turns of the loop, `idle` the
same while nothing happens, which is what this machine does to any process.

usage: python bench/loop_lag.py [--megabytes 5] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from http_front import SteppingClient

from pagedcore.config import EngineConfig
from pagedcore.models.source import resolve_model
from pagedcore.openai import build_app
from pagedcore.text.tokenizer import load_tokenizer

TURN_S = 0.001
PART_BYTES = 1 << 16
BYTES_OF_A_MESSAGE = 50
BYTES_OF_AN_ID = 5
SENTENCE = "The quick brown fox jumps over the lazy dog near the old river bank, number {}. "


class Lag:
    """Owns the longest time between two turns of the event loop, as long as it runs."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(TURN_S)
            now_s = time.perf_counter()
            self.longest_s = max(self.longest_s, now_s - last_s - TURN_S)
            last_s = now_s


async def lag_during(work: Awaitable[Any]) -> tuple[float, float]:
    """Longest lag, and how long the work took."""
    lag = Lag()
    watch = asyncio.ensure_future(lag.watch())
    await asyncio.sleep(10 * TURN_S)
    start_s = time.perf_counter()
    await work
    took_s = time.perf_counter() - start_s
    await asyncio.sleep(10 * TURN_S)
    watch.cancel()
    return lag.longest_s, took_s


async def post(app: Any, path: str, raw: bytes, status: int = 200) -> None:
    """One request, its body in parts as a server receives it."""
    parts = [raw[at : at + PART_BYTES] for at in range(0, len(raw), PART_BYTES)]
    last = len(parts) - 1
    messages = ({"type": "http.request", "body": part, "more_body": index < last} for index, part in enumerate(parts))

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        message = next(messages, None)
        if message is None:
            await asyncio.Event().wait()
        assert message is not None
        return message

    async def send(message: Any) -> None:
        assert message.get("status", status) == status, message

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": [], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http", "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)


def bodies(num_bytes: int, vocab_size: int) -> dict[str, tuple[str, bytes]]:
    """Name -> path and body of each kind of prompt."""
    prompt = "".join(SENTENCE.format(number) for number in range(num_bytes // len(SENTENCE)))
    roles = ("user", "assistant")
    short = [{"role": roles[number % 2], "content": f"message {number}"} for number in range(num_bytes // BYTES_OF_A_MESSAGE)]
    ids = random.Random(0).choices(range(vocab_size), k=num_bytes // BYTES_OF_AN_ID)
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "text": ("/v1/completions", {"prompt": prompt}),
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}),
        "messages": ("/v1/chat/completions", {"messages": short}),
        "token ids": ("/v1/completions", {"prompt": ids}),
    }
    return {name: (path, json.dumps({**body, "max_tokens": 1}).encode()) for name, (path, body) in kinds.items()}


async def measure(num_bytes: int, num_rounds: int) -> None:
    text = load_tokenizer(resolve_model(EngineConfig()).model_dir)
    patient, strict = (SteppingClient(0.001, text, vocab_size=text.vocab_size, max_model_len=limit) for limit in (2**31, 8192))
    kinds = bodies(num_bytes, text.vocab_size)
    runs = [(name, patient, *kinds[name], 200) for name in kinds] + [("too long", strict, *kinds["text"], 400)]
    for name, client, path, raw, status in runs:
        app = build_app(client)
        for _ in range(num_rounds):
            longest_s, took_s = await lag_during(post(app, path, raw, status))
            idle_s, _ = await lag_during(asyncio.sleep(took_s))
            print(f"{name:<10}{len(raw) / 1e6:>6.1f} MB {took_s:>8.2f} s{1e3 * longest_s:>10.1f}{1e3 * idle_s:>8.1f}", flush=True)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{'prompt':<10}{'body':>9} {'took':>10}{'longest':>10}{'idle ms':>8}")
    asyncio.run(measure(round(args.megabytes * 1e6), args.rounds))


if __name__ == "__main__":
    main()
