"""`pagedcore bench serve`, from a URL or a config to results."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pagedcore.commands.bench.facts import default_label, device_name, model_shape, software_facts
from pagedcore.commands.bench.local_server import engine_arguments, local_server
from pagedcore.commands.bench.online_load import run_online
from pagedcore.commands.bench.online_stream import Endpoint
from pagedcore.commands.bench.results import Fact, Results
from pagedcore.commands.bench.serve import ServeWork, measure_serve
from pagedcore.commands.progress_bars import progress_bars
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server to load."""

    url: str | None
    """None starts one of ours with `config`."""
    config: EngineConfig
    model: str | None
    """The served name to ask for; None is the first that the server lists."""
    api_key: str | None

    def __post_init__(self) -> None:
        if self.url is None:
            return
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url is {self.url!r} and must begin with http:// or https://, without /v1.")
        set_here = self.config.replace(model=None, seed=0) != EngineConfig()
        if set_here:
            raise ConfigError("With --url the server is there already: of the engine's flags leave out all but --model and --seed.")


def run_serve(target: Target, work: ServeWork, label: str | None) -> Results:
    with _served(target) as url, progress_bars() as progress:
        endpoint = Endpoint(url=url, model=target.model or first_model(url, target.api_key), api_key=target.api_key)
        points = measure_serve(endpoint, work, run_online, progress)
    facts: dict[str, Fact] = {
        **software_facts(),
        "device": _device(target),
        "url": target.url,
        "model": endpoint.model,
        **_shape(target),
        "engine_flags": None if target.url is not None else " ".join(engine_arguments(target.config)),
    }
    asked: dict[str, Fact] = {
        "prompt_tokens": str(work.load.prompt_tokens),
        "shared_tokens": work.load.num_shared_tokens,
        "output_tokens": str(work.load.output_tokens),
        "temperature": work.temperature,
        "counts_each": work.counts_each,
        "client_processes": work.num_processes,
        "rounds": work.rounds,
        "seed": work.load.seed,
    }
    return Results(command="serve", label=label or target.url or default_label(), facts=facts, work=asked, points=points)


def first_model(url: str, api_key: str | None) -> str:
    """The first name that the server lists. Raises `ConfigError` where it lists none."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url.rstrip('/')}/v1/models", headers=headers), timeout=30) as reply:
            return str(json.loads(reply.read())["data"][0]["id"])
    except (urllib.error.URLError, OSError, ValueError, LookupError) as error:
        raise ConfigError(f"{url}/v1/models names no model ({error}); check --url, or name one with --model.") from error


@contextmanager
def _served(target: Target) -> Iterator[str]:
    if target.url is not None:
        yield target.url
        return
    with local_server(target.config) as url:
        yield url


def _shape(target: Target) -> dict[str, Fact]:
    """Of the model that a server of ours served; another tells nothing of its own."""
    if target.url is not None:
        return {}
    from pagedcore.models.source import resolve_model

    return model_shape(resolve_model(target.config).model_dir)


def _device(target: Target) -> str:
    """Of the machine that the server runs on, where that is this one."""
    if target.url is not None:
        return f"server at {target.url}"
    import torch

    device = target.config.device
    return device_name("cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device)
