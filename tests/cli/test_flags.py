"""One flag for each setting, its docstring as help, and only what was typed passed on."""

from __future__ import annotations

import dataclasses
import inspect
import typing

import pytest
import typer

from pagedcore.commands.field_docs import field_docs
from pagedcore.commands.flags import engine_flags, sampling_flags, takes_engine_flags, takes_sampling_flags
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError, InvalidRequestError
from pagedcore.sampling_params import SamplingParams


def parse_engine_flags(*arguments: str) -> EngineConfig:
    seen: list[EngineConfig] = []

    @takes_engine_flags
    def command(config: EngineConfig) -> None:
        seen.append(config)

    app = typer.Typer(add_completion=False)
    app.command()(command)
    app(args=list(arguments), standalone_mode=False)
    (config,) = seen
    return config


def test_each_engine_setting_has_exactly_one_flag_with_its_docstring() -> None:
    flags = engine_flags()
    assert [flag.field for flag in flags] == [field.name for field in dataclasses.fields(EngineConfig)]
    assert {flag.field: flag.help for flag in flags} == field_docs(EngineConfig)
    assert [flag.name for flag in flags[:2]] == ["--model", "--tokenizer"]


def test_without_flags_the_config_is_the_default_one() -> None:
    assert parse_engine_flags() == EngineConfig()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "m", "--block-size", "32"], EngineConfig(model="m", block_size=32)),
        (["--max-model-len", "2048"], EngineConfig(max_model_len=2048)),
        (["--max-model-len", "auto"], EngineConfig()),
        (["--overlap", "true"], EngineConfig(overlap=True)),
        (["--overlap", "false"], EngineConfig(overlap=False)),
        (["--no-enable-prefix-caching"], EngineConfig(enable_prefix_caching=False)),
        (["--enforce-eager", "--gpu-memory-utilization=0.5"], EngineConfig(enforce_eager=True, gpu_memory_utilization=0.5)),
        (["--served-model-name", "a", "--served-model-name", "b"], EngineConfig(served_model_name=("a", "b"))),
        (
            ["--scheduling-policy", "priority", "--max-batch-wait-ms", "2.5"],
            EngineConfig(scheduling_policy="priority", max_batch_wait_ms=2.5),
        ),
        (["--revision", "123", "--metrics-instance", "1"], EngineConfig(revision="123", metrics_instance="1")),
    ],
)
def test_flags_become_the_fields_they_name(arguments: list[str], expected: EngineConfig) -> None:
    assert parse_engine_flags(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-size", "7"], "block_size is 7"),
        (["--overlap", "perhaps"], "overlap is 'perhaps'"),
        (["--max-model-len", "long"], "max_model_len is 'long'"),
        (["--swap-space", "-4"], "swap_space is -4.0 GiB"),
    ],
)
def test_a_bad_value_is_the_configs_own_error(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_engine_flags(*arguments)


def test_sampling_flags_keep_the_commands_defaults_unless_typed() -> None:
    seen: list[SamplingParams] = []

    @takes_sampling_flags({"max_tokens": 99, "temperature": 0.25})
    def command(params: SamplingParams) -> None:
        seen.append(params)

    app = typer.Typer(add_completion=False)
    app.command()(command)
    app(args=["--temperature", "0", "--stop", "a", "--stop", "b", "--stop-token-ids", "3"], standalone_mode=False)
    assert seen == [SamplingParams(max_tokens=99, temperature=0.0, stop=("a", "b"), stop_token_ids=(3,))]
    with pytest.raises(InvalidRequestError, match="top_p is"):
        app(args=["--top-p", "2"], standalone_mode=False)


def test_a_command_with_both_kinds_keeps_one_seed_the_requests() -> None:
    seen: list[tuple[EngineConfig, SamplingParams, str]] = []

    @takes_engine_flags
    @takes_sampling_flags({})
    def command(params: SamplingParams, config: EngineConfig, prompt: str) -> None:
        seen.append((config, params, prompt))

    parameters = list(inspect.signature(command).parameters)
    assert parameters[0] == "prompt"
    assert parameters.count("seed") == 1
    app = typer.Typer(add_completion=False)
    app.command()(command)
    app(args=["hello", "--seed", "7", "--block-size", "8"], standalone_mode=False)
    assert seen == [(EngineConfig(block_size=8), SamplingParams(seed=7), "hello")]


def test_every_sampling_flag_can_be_parsed_from_one_or_repeated_values() -> None:
    for flag in sampling_flags():
        assert flag.type in (bool, int, float, str) or typing.get_origin(flag.type) is list, flag.field


def test_the_help_names_defaults_and_choices() -> None:
    by_name = {flag.field: flag for flag in engine_flags()}
    assert by_name["block_size"].metavar == "8|16|32|64|128|256"
    assert by_name["load_format"].metavar == "auto|safetensors|dummy"
    assert (by_name["max_num_seqs"].default, by_name["enable_prefix_caching"].default, by_name["model"].default) == ("256", "true", None)
