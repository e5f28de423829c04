"""Code written for another engine runs with the package's name replaced."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

import pagedcore
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError, UnknownOptionError
from support.repository import ROOT

PACKAGE = ROOT / "pagedcore"


def test_engine_args_import_and_build_a_config() -> None:
    from pagedcore.engine.arg_utils import AsyncEngineArgs, EngineArgs  # type: ignore[import-not-found]

    assert AsyncEngineArgs is pagedcore.AsyncEngineArgs
    assert EngineArgs is pagedcore.EngineArgs
    args = AsyncEngineArgs(model="m", block_size=16, max_num_seqs=256, kv_cache_dtype="auto")
    assert isinstance(args, EngineConfig)
    assert (args.model, args.block_size, args.max_num_seqs) == ("m", 16, 256)
    assert AsyncEngineArgs("m").model == "m"


def test_engine_args_take_the_other_spelling_of_the_batch_wait() -> None:
    assert pagedcore.AsyncEngineArgs(delay_factor=0.01).max_batch_wait_ms == 10.0


def test_engine_args_refuse_an_unknown_keyword_and_name_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match="Did you mean 'max_num_seqs'"):
        pagedcore.AsyncEngineArgs(max_num_seq=4)
    with pytest.raises(ConfigError, match="block_size is 7"):
        pagedcore.EngineArgs(block_size=7)


@pytest.mark.parametrize(("module", "name"), [("pagedcore.sampling_params", "SamplingParams"), ("pagedcore.outputs", "RequestOutput")])
def test_plain_names_have_the_same_home(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is getattr(pagedcore, name)


@pytest.mark.needs_torch
@pytest.mark.parametrize(
    ("module", "name", "public"),
    [
        ("pagedcore.engine.async_llm_engine", "AsyncLLMEngine", "AsyncEngine"),
        ("pagedcore.entrypoints.llm", "LLM", "LLM"),
    ],
)
def test_engines_are_found_where_people_look_for_them(module: str, name: str, public: str) -> None:
    assert getattr(importlib.import_module(module), name) is getattr(pagedcore, public)


def test_random_uuid_is_a_fresh_hexadecimal_id() -> None:
    from pagedcore.utils import random_uuid  # type: ignore[import-not-found]

    first, second = random_uuid(), random_uuid()
    assert first != second
    assert len(first) == 32
    assert int(first, 16) >= 0


def test_no_shim_shares_its_name_with_a_module_of_pagedcore() -> None:
    # The first place on the package's path wins: a real module would hide the shim.
    shims = {path.stem for path in (PACKAGE / "compat").iterdir() if path.stem not in ("__init__", "__pycache__")}
    own = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").exists())}
    assert shims == {"engine", "entrypoints", "utils"}
    assert not shims & own


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []
    monkeypatch.setattr("pagedcore.cli.main", lambda arguments: calls.append(list(arguments)))
    return calls


def run_api_server(arguments: Sequence[str]) -> None:
    importlib.import_module("pagedcore.entrypoints.openai.api_server").main(arguments)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (
            ["--model", "M", "--host", "H", "--port", "1", "--served-model-name", "N", "--api-key", "K"],
            ["--model", "M", "--host", "H", "--port", "1", "--served-model-name", "N", "--api-key", "K"],
        ),
        (
            ["--served-model-name", "a", "b", "--max_model_len", "64"],
            ["--served-model-name", "a", "--served-model-name", "b", "--max-model-len", "64"],
        ),
        (["--served-model-name=a_b", "--model=x_y"], ["--served-model-name=a_b", "--model=x_y"]),
        ([], []),
    ],
)
def test_api_server_flags_are_those_of_serve(served: list[list[str]], typed: list[str], expected: list[str]) -> None:
    run_api_server(typed)
    assert served == [["serve", *expected]]


def test_the_api_server_module_runs_with_dash_m() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "adapters")])}
    command = [sys.executable, "-m", "pagedcore.entrypoints.openai.api_server"]
    shown = subprocess.run([*command, "--help"], env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    for field in EngineConfig.__dataclass_fields__:
        assert f"--{field.replace('_', '-')} " in shown.stdout
    assert "[default: 8000;" in " ".join(shown.stdout.split())
    refused = subprocess.run([*command, "--block_size", "7"], env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "block_size is 7" in refused.stderr
