"""A real Prometheus on a free port, with the rules of deploy/observability, and the traffic that it looks at."""

from __future__ import annotations

import json
import math
import random
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from support.deployed import OBSERVABILITY, read_yaml
from support.served import free_port, wait_until
from support.small_pool_app import BLOCK_SIZE, FAILING_ID, KEYS, MAX_MODEL_LEN, OPEN_KEY

SCRAPE_INTERVAL = "250ms"
RATE_INTERVAL = "3s"
"""What $__rate_interval stands for."""
START_TIMEOUT_S = 120.0
_VOCABULARY = range(2, 40)


@dataclass(frozen=True, slots=True)
class Prometheus:
    """One that runs, and is asked over HTTP."""

    url: str

    def get(self, path: str, **params: Any) -> Any:
        """The `data` of an answer. Fails with what Prometheus says of an expression that it cannot evaluate."""
        reply = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=60)
        answer = reply.json()
        assert answer["status"] == "success", answer["error"]
        return answer["data"]

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def labels_between(self, expr: str, start_s: float, end_s: float) -> set[tuple[tuple[str, str], ...]]:
        """The labels of each line that a panel would draw for that time."""
        result = self.get("query_range", query=expr, start=start_s, end=end_s, step="500ms")["result"]
        return {tuple(sorted(series["metric"].items())) for series in result}

    def values_now(self, expr: str) -> list[float]:
        """The numbers of an instant query; NaN left out."""
        return _numbers(point for series in self.get("query", query=expr)["result"] for point in [series["value"]])

    def values_between(self, expr: str, start_s: float, end_s: float) -> list[float]:
        """All numbers that a panel would draw for that time; NaN left out."""
        result = self.get("query_range", query=expr, start=start_s, end=end_s, step="500ms")["result"]
        return _numbers(point for series in result for point in series["values"])


def _numbers(points: Iterator[Any]) -> list[float]:
    return [number for _, text in points if not math.isnan(number := float(text))]


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with deploy's own configuration, but for the target and for intervals that suit a test."""
    config = read_yaml(OBSERVABILITY / "prometheus.yml")
    config["global"] = {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": "1s", "scrape_timeout": SCRAPE_INTERVAL}
    config["rule_files"] = [str(OBSERVABILITY / pattern) for pattern in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    file = folder / "prometheus.json"  # JSON is YAML
    file.write_text(json.dumps(config), encoding="utf-8")
    port = free_port()
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    log = folder / "prometheus.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            wait_until(server.is_ready, START_TIMEOUT_S, f"a ready Prometheus; its log is {log}")
            yield server
        finally:
            process.terminate()


@contextmanager
def traffic(url: str, num_clients: int = 7) -> Iterator[None]:
    """Clients that ask until the block ends: what they share, repeat, break off and ask wrongly moves every number."""
    ended = threading.Event()
    threads = [threading.Thread(target=_ask_until, args=(url, seed, ended)) for seed in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _ask_until(url: str, seed: int, ended: threading.Event) -> None:
    rng = random.Random(seed)
    with httpx.Client(base_url=f"{url}/v1", timeout=60) as client:
        while not ended.is_set():
            _ask(client, rng)


def _ask(client: httpx.Client, rng: random.Random) -> None:
    key = rng.choice([*KEYS, OPEN_KEY])
    headers = {"Authorization": f"Bearer {key}"}
    body: dict[str, Any] = {"model": "fake", "prompt": _prompt(rng), "max_tokens": rng.randint(8, 56), "n": rng.choice([1, 1, 6])}
    match rng.randrange(12):
        case 0:
            headers["X-Request-Id"] = FAILING_ID
        case 1:
            body["prompt"] = [2] * (MAX_MODEL_LEN + 1)
        case 2:
            body["prompt_logprobs"] = 0
        case 3:
            _break_off(client, headers, body)
            return
    client.post("/completions", headers=headers, json=body)


def _break_off(client: httpx.Client, headers: dict[str, str], body: dict[str, Any]) -> None:
    with client.stream("POST", "/completions", headers=headers, json={**body, "max_tokens": 60, "stream": True}) as reply:
        next(reply.iter_raw(), None)


def _prompt(rng: random.Random) -> list[int]:
    """Instructions that all share, one of a few documents, and a question of its own."""
    instructions = [1] * (3 * BLOCK_SIZE)
    document = [rng.randrange(5)] * (4 * BLOCK_SIZE)
    return instructions + document + rng.choices(_VOCABULARY, k=rng.randint(3, 12))
