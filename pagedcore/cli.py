"""The command line: `pagedcore serve | chat | generate | bench | compare | doctor`. Commands are typed functions that build a config."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pagedcore.commands.flags import takes_engine_flags, takes_sampling_flags
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError, PagedCoreError, RequestError
from pagedcore.sampling_params import SamplingParams

app = typer.Typer(
    name="pagedcore",
    help="An LLM inference engine to embed: paged KV cache, continuous batching, prefix caching.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # tables would cut the longer flag names on a terminal of 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)

USAGE_EXIT_CODE = 2
FAILURE_EXIT_CODE = 1

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="The same as --model: a folder or a hub name. None is the embedded model.", show_default=False),
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Errors of pagedcore end the process with one sentence: 2 for a wrong setting or request, else 1."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="pagedcore")
    except PagedCoreError as error:
        typer.echo(f"pagedcore: {error}", err=True)
        raise SystemExit(USAGE_EXIT_CODE if isinstance(error, (ConfigError, RequestError)) else FAILURE_EXIT_CODE) from error


@app.callback(invoke_without_command=True)
def _version(show: Annotated[bool, typer.Option("--version", help="Print the version and end.", is_eager=True)] = False) -> None:
    if show:
        from pagedcore import __version__

        typer.echo(f"pagedcore {__version__}")
        raise typer.Exit


@app.command()
@takes_engine_flags
def serve(
    config: EngineConfig,
    source: ModelArgument = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1024, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that clients must send; none lets everybody in. May be repeated.",
            envvar="PAGEDCORE_API_KEY",
            metavar="<str>",
            show_default=False,
        ),
    ] = None,
    warmup_file: Annotated[
        Path | None,
        typer.Option(
            help="Prompts computed before the first request: a JSON list of texts and lists of messages, or one text a line.",
            show_default=False,
        ),
    ] = None,
    num_api_servers: Annotated[
        int | None, typer.Option(help="HTTP processes in front of the engine; None is one.", min=1, show_default=False)
    ] = None,
) -> None:
    """Serve an OpenAI-compatible endpoint.

    LitServe answers /v1/chat/completions, /v1/completions, /v1/models, /metrics and more.
    """
    from pagedcore.commands.greeting import greeting
    from pagedcore.models.embedded import EMBEDDED_NAME
    from pagedcore.openai.settings import ServerSettings
    from pagedcore_adapters.litserve_api import build_server

    config = _with_model(config, source)
    settings = ServerSettings(api_keys=tuple(api_key or ()), adapter="litserve")
    server = build_server(config, settings=settings, warmup_file=warmup_file, num_api_servers=num_api_servers)
    names = (config.served_model_name,) if isinstance(config.served_model_name, str) else config.served_model_name
    name = names[0] if names else config.model or EMBEDDED_NAME
    typer.echo(f"pagedcore loads {name} ...")
    server.run(host=host, port=port, on_ready=lambda: typer.echo(greeting(host, port, name, needs_key=bool(api_key))))


@app.command()
@takes_engine_flags
@takes_sampling_flags({"max_tokens": 512, "temperature": 0.7})
def chat(
    params: SamplingParams,
    config: EngineConfig,
    source: ModelArgument = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
) -> None:
    """Talk to a model in the terminal.

    Each turn finds the earlier ones in the prefix cache.
    """
    from pagedcore.async_engine import AsyncEngine
    from pagedcore.commands.conversation import Conversation, run_chat

    engine = AsyncEngine(_with_model(config, source))
    try:
        run_chat(Conversation(engine, params, system), lambda: input("> "), _write)
    finally:
        engine.close_sync()


@app.command()
@takes_engine_flags
@takes_sampling_flags({"max_tokens": 256, "temperature": 0.0})
def generate(
    params: SamplingParams,
    config: EngineConfig,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.", show_default=False)],
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
) -> None:
    """Answer one prompt.

    The text goes to standard output, a line about the cache to standard error.
    """
    from pagedcore.commands.one_shot import cache_line, complete

    output = complete(config, sys.stdin.read() if prompt == "-" else prompt, params, is_raw=raw)
    if output.error is not None:
        raise output.error
    typer.echo(output.outputs[0].text)
    typer.echo(cache_line(output), err=True)


@app.command()
@takes_engine_flags
def bench(
    config: EngineConfig,
    source: ModelArgument = None,
    num_prompts: Annotated[int, typer.Option(help="Requests, all sent at once.", min=1, max=4096)] = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt (random ids).", min=1)] = 128,
    shared_tokens: Annotated[int, typer.Option(help="Tokens at the start that all prompts share.", min=0)] = 0,
    output_tokens: Annotated[int, typer.Option(help="Tokens generated for each prompt.", min=1)] = 64,
) -> None:
    """Measure throughput and latency on this machine.

    Random prompts are sent all at once; a model with no tokenizer will do.
    """
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from pagedcore.async_engine import AsyncEngine
    from pagedcore.commands.throughput import Load, run_load

    load = Load(
        num_prompts=num_prompts,
        num_prompt_tokens=prompt_tokens,
        num_shared_tokens=shared_tokens,
        num_output_tokens=output_tokens,
        seed=config.seed,
    )
    engine = AsyncEngine(_with_model(config, source))
    try:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("requests", total=num_prompts)
            result = run_load(engine, load, lambda: progress.advance(task))
        plan = engine.plan
    finally:
        engine.close_sync()
    table = Table(show_header=False, title=f"{plan.model_name}, {plan.dtype}, {plan.device}, block_size {plan.block_size}")
    for row in result.rows():
        table.add_row(*row)
    Console().print(table)


@app.command()
@takes_engine_flags
def compare(
    config: EngineConfig,
    a: Annotated[str, typer.Argument(metavar="A", help="The reference: folder, hub name or SmolLM2-135M-Instruct.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="The model to judge, of the same tokenizer.", show_default=False)],
    text: Annotated[Path, typer.Option(help="UTF-8 text to score: the nearer to your own traffic, the better.", show_default=False)],
    window: Annotated[
        int | None,
        typer.Option(help="Tokens that are scored together; None is 1024, or less if a model holds less.", min=2, show_default=False),
    ] = None,
    max_text_tokens: Annotated[int | None, typer.Option(help="Score the first so many tokens only.", min=2, show_default=False)] = None,
    traffic: Annotated[
        Path | None,
        typer.Option(help="Requests that both answer: a JSON list of texts and lists of messages, or one text a line.", show_default=False),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests of the traffic in flight.", min=1, max=4096)] = 8,
    traffic_output_tokens: Annotated[int, typer.Option(help="Tokens generated for each request of the traffic.", min=1)] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Judge model B by model A.

    Perplexity of both, KL divergence, agreement, sizes and speed on the same text; with --traffic also cache hit rates and memory.
    Engine flags apply to both.
    """
    from rich.console import Console

    from pagedcore.commands.compare import compare_models, read_text
    from pagedcore.commands.comparison_table import show
    from pagedcore.commands.progress_bars import progress_bars
    from pagedcore.commands.trial import Traffic
    from pagedcore.warm_up import read_warm_up_file

    if config.model is not None:
        raise ConfigError(f"compare takes two models as arguments; leave out --model {config.model}.")
    prompts = None if traffic is None else read_warm_up_file(traffic, what="traffic file", flag="--traffic")
    with progress_bars() as progress:
        comparison = compare_models(
            config.replace(model=a),
            config.replace(model=b),
            read_text(text),
            window=window,
            max_text_tokens=max_text_tokens,
            traffic=None if prompts is None else Traffic(prompts=prompts, concurrency=concurrency, output_tokens=traffic_output_tokens),
            progress=progress,
        )
    if as_json:
        Console(soft_wrap=True).print_json(data=comparison.as_json())
    else:
        show(Console(), comparison)


@app.command()
def doctor(
    model: Annotated[
        Path | None, typer.Option(help="Local model folder to advise for; none is the embedded model.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine can do.

    And which block_size and max_num_seqs fit it, with the reasons.
    """
    from rich.console import Console

    from pagedcore.commands import doctor as examination

    machine, advice = examination.examine(model)
    if as_json:
        Console(soft_wrap=True).print_json(data=examination.as_json(machine, advice))
    else:
        examination.show(Console(soft_wrap=True), machine, advice)


def _with_model(config: EngineConfig, source: str | None) -> EngineConfig:
    """The config with the model that was typed as an argument. Raises `ConfigError` when --model says another one."""
    if source is None:
        return config
    if config.model not in (None, source):
        raise ConfigError(f"The argument says model {source!r} and --model says {config.model!r}; give one of them.")
    return config.replace(model=source)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
