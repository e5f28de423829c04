"""`pagedcore bench` on the command line."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedcore import cli
from pagedcore.async_engine import AsyncEngine
from pagedcore.commands.bench import runs
from pagedcore.commands.bench.results import read_results, write_json
from pagedcore.config import EngineConfig
from support.bench_runs import ALL
from support.engine_builder import make_engine


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0)


class Engines:
    """Makes engines on the fake runner in place of real ones; remembers them and their configs."""

    def __init__(self) -> None:
        self.configs: list[EngineConfig] = []
        self.engines: list[AsyncEngine] = []

    def __call__(self, config: EngineConfig) -> AsyncEngine:
        self.configs.append(config)
        options: dict[str, Any] = {"max_num_seqs": config.max_num_seqs, "enable_prefix_caching": config.enable_prefix_caching}
        self.engines.append(make_engine(max_num_batched_tokens=64, **options).engine)
        return self.engines[-1]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    made = Engines()
    monkeypatch.setattr(runs, "AsyncEngine", made)
    yield made
    for engine in made.engines:
        assert not engine.loop.is_alive, "a command closes its engine"


def test_help_lists_what_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "--help") == 0
    shown = capsys.readouterr().out
    for command in ("throughput", "latency", "prefix", "serve", "kernels", "products", "plot"):
        assert f"\n  {command} " in shown
        assert run("bench", command, "--help") == 0
        assert f"Usage: pagedcore bench {command}" in capsys.readouterr().out


def test_flags_without_a_command_name_the_one_that_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "--num-prompts", "3", "--model", "my model") == 2
    assert capsys.readouterr().err == (
        "pagedcore: bench needs the name of what to measure; for throughput type: "
        "pagedcore bench throughput --num-prompts 3 --model 'my model'\n"
    )


def test_throughput_writes_what_it_shows(engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv"), "--label", "mine")
    work = ("--prompt-tokens", "8-12", "--output-tokens", "2", "--concurrency", "2,1", "--rounds", "2")
    assert run("bench", "throughput", "some-model", *work, "--max-num-seqs", "4", *files) == 0
    assert engines.configs == [EngineConfig(model="some-model", max_num_seqs=4)]
    found = read_results(tmp_path / "a.json")
    assert (found.command, found.label) == ("throughput", "mine")
    assert [(point["concurrency"], point["num_requests"], point["num_output_tokens"]) for point in found.points] == [(1, 4, 8), (2, 8, 16)]
    assert found.work["prompt_tokens"] == "8 to 12"
    assert found.facts["model"] == "fake"
    with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
        assert [line["concurrency"] for line in csv.DictReader(file)] == ["1", "2"]
    assert "pagedcore bench throughput: fake, float32" in capsys.readouterr().out


def test_latency_measures_each_batch_and_context(engines: Engines, tmp_path: Path) -> None:
    work = ("--batch", "1,2", "--context", "8,16", "--output-tokens", "3", "--rounds", "1")
    assert run("bench", "latency", *work, "--json", str(tmp_path / "a.json")) == 0
    points = read_results(tmp_path / "a.json").points
    assert [(point["batch"], point["context"]) for point in points] == [(1, 8), (1, 16), (2, 8), (2, 16)]


def test_prefix_measures_with_the_cache_and_then_without(engines: Engines, tmp_path: Path) -> None:
    work = ("--num-prompts", "3", "--shared-tokens", "32", "--own-tokens", "4", "--output-tokens", "2", "--rounds", "1")
    assert run("bench", "prefix", *work, "--json", str(tmp_path / "a.json")) == 0
    assert [config.enable_prefix_caching for config in engines.configs] == [True, False]
    with_cache, without = read_results(tmp_path / "a.json").points
    assert (with_cache["prefix_caching"], without["prefix_caching"]) == (True, False)
    assert (with_cache["num_cached_tokens"], without["num_cached_tokens"]) == (64, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("throughput", "--prompt-tokens", "x"), "--prompt-tokens is 'x' and must be a number of tokens"),
        (("plot", "a.json", "-o", "/no/such/folder/a.png"), "The folder '/no/such/folder' of '/no/such/folder/a.png' does not exist"),
        (("throughput", "--concurrency", "1 8"), "--concurrency is '1 8' and must be whole numbers"),
        (("throughput", "--json", "/no/such/folder/x"), "The folder '/no/such/folder' of '/no/such/folder/x' does not exist; make it, or"),
        (("throughput", "--concurrency", "1,64", "--num-prompts", "16"), "--num-prompts 16 are too few for --concurrency 64"),
        (("serve", "--concurrency", "4", "--num-prompts", "3"), "--num-prompts 3 are too few for --concurrency 4"),
        (("latency", "--batch", "0"), "--batch is '0'"),
        (("products", "--bits", "5"), "--bits is 5 and must be 4 or 8"),
        (("products", "--rows", "1,x"), "--rows is '1,x' and must be whole numbers"),
        (("prefix", "--no-enable-prefix-caching"), "leave out --no-enable-prefix-caching"),
        (("serve", "--rate", "2", "--concurrency", "2"), "give one of them"),
        (("serve", "--url", "localhost:8000"), "must begin with http://"),
        (("serve", "--url", "http://h", "--max-num-seqs", "8"), "With --url the server is there already"),
    ],
)
def test_what_is_wrong_is_said_before_an_engine_is_made(
    engines: Engines, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", *arguments) == 2
    assert message in capsys.readouterr().err
    assert engines.configs == []


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="the extra plot is not installed")
def test_plot_draws_files_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(ALL[0], tmp_path / "a.json")
    assert run("bench", "plot", str(tmp_path / "a.json"), str(tmp_path / "a.json"), "-o", str(tmp_path / "a.png")) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"wrote {tmp_path / 'a.png'}\n"


@pytest.mark.needs_torch
@pytest.mark.parametrize("command", ["kernels", "products"])
def test_kernels_need_a_gpu_and_say_so_in_one_sentence(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("bench", command) == 2
    assert capsys.readouterr().err == (
        f"pagedcore: bench {command} measures Triton kernels and needs an NVIDIA GPU; torch finds none on this machine.\n"
    )
