"""The command line: `pagedcore serve`, `chat`, `bench`, `status` and others, typed functions that build a config."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from pagedcore.commands.bench.app import bench_app
from pagedcore.commands.flags import takes_engine_flags, takes_sampling_flags
from pagedcore.commands.model_argument import ModelArgument, with_model
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError, PagedCoreError, RequestError
from pagedcore.sampling_params import SamplingParams
from pagedcore.tools.forms import FORMS, FormName

if TYPE_CHECKING:
    from pagedcore.openai.settings import ServerSettings

app = typer.Typer(
    name="pagedcore",
    help="An LLM inference engine to embed: paged KV cache, continuous batching, prefix caching.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # tables would cut the longer flag names on a terminal of 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench_app)

TOOL_PARSERS = ("auto", *FORMS)
DrainTimeout = Annotated[float, typer.Option(help="Seconds that open answers may take to end after a signal.", min=0.0)]
USAGE_EXIT_CODE = 2
FAILURE_EXIT_CODE = 1


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
    tenant_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Tenant and a key of theirs; requests with it count as theirs. May be repeated.",
            envvar="PAGEDCORE_TENANT_KEYS",
            metavar="NAME=KEY",
            show_default=False,
        ),
    ] = None,
    tenant_priority: Annotated[
        list[str] | None,
        typer.Option(
            help="Priority of a tenant, lower first, with --scheduling-policy priority; bodies may then give none. May be repeated.",
            metavar="NAME=NUMBER",
            show_default=False,
        ),
    ] = None,
    ignore_field: Annotated[
        list[str] | None,
        typer.Option(
            help="Field of requests to leave out instead of refusing it; the reply names it. May be repeated.",
            metavar="NAME",
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
    ui_show_text: Annotated[bool, typer.Option("--ui-show-text", help="Let the live page, /ui, show text of prompts.")] = False,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="What the live page judges by, such as ttft_p99_s=2, hit_rate=0.6, device_busy, running_share, blocked or token_gap_s. "
            "May be repeated.",
            metavar="NAME=VALUE",
            show_default=False,
        ),
    ] = None,
    tool_parser: Annotated[
        str, typer.Option(help="How the model writes calls of tools; auto reads it off the chat template.", metavar="|".join(TOOL_PARSERS))
    ] = "auto",
    socket: Annotated[
        Path | None,
        typer.Option(help="Attach to the engine at this Unix socket, see `pagedcore engine`, in place of making one.", show_default=False),
    ] = None,
    fronts: Annotated[
        int | None,
        typer.Option(help="HTTP processes over one engine process, without LitServe, for many streams at once.", min=1, show_default=False),
    ] = None,
    drain_timeout_s: DrainTimeout = 30.0,
) -> None:
    """Serve an OpenAI-compatible endpoint.

    LitServe, or processes of our own with --socket or --fronts, answer /v1/chat/completions, /v1/completions, /v1/models, /metrics
    and more.
    """
    from pagedcore.console.indicators import parse_targets
    from pagedcore.http.api_keys import parse_tenant_keys, parse_tenant_priorities
    from pagedcore.openai.settings import ServerSettings

    config = with_model(config, source)
    settings = ServerSettings(
        api_keys=tuple(api_key or ()),
        tenants=parse_tenant_keys(tenant_key or ()),
        tenant_priorities=parse_tenant_priorities(tenant_priority or ()),
        ignored_fields=tuple(ignore_field or ()),
        ui_show_text=ui_show_text,
        tool_parser=cast(FormName, tool_parser),
        targets=parse_targets(target or ()),
    )
    if settings.tenant_priorities and socket is None and config.scheduling_policy != "priority":
        raise ConfigError("--tenant-priority orders the waiting queue by priority; give --scheduling-policy priority, too.")
    if socket is None and fronts is None:
        _serve_by_litserve(config, settings, host, port, num_api_servers, warmup_file, drain_timeout_s)
        return
    if num_api_servers is not None:
        raise ConfigError("--num-api-servers are LitServe's processes, which --socket and --fronts do without; give --fronts.")
    from pagedcore.commands.serving import serve_by_fronts

    serve_by_fronts(
        config,
        settings,
        host=host,
        port=port,
        engine_socket=socket,
        num_fronts=fronts or 1,
        warmup_file=warmup_file,
        drain_timeout_s=drain_timeout_s,
        say=typer.echo,
    )


def _serve_by_litserve(
    config: EngineConfig,
    settings: ServerSettings,
    host: str,
    port: int,
    num_api_servers: int | None,
    warmup_file: Path | None,
    drain_timeout_s: float,
) -> None:
    from pagedcore.commands.greeting import greeting
    from pagedcore.models.embedded import EMBEDDED_NAME
    from pagedcore_adapters.litserve_api import build_server

    server = build_server(
        config, settings=settings, warmup_file=warmup_file, num_api_servers=num_api_servers, drain_timeout_s=drain_timeout_s
    )
    names = (config.served_model_name,) if isinstance(config.served_model_name, str) else config.served_model_name
    name = names[0] if names else config.model or EMBEDDED_NAME
    hello = greeting(host, port, name, needs_key=bool(settings.api_keys or settings.tenants))
    typer.echo(f"pagedcore loads {name} ...")
    server.run(host=host, port=port, on_ready=lambda: typer.echo(hello))


@app.command()
@takes_engine_flags
def engine(
    config: EngineConfig,
    socket: Annotated[Path, typer.Option(help="Path of the Unix socket to listen at; only this user can connect.", show_default=False)],
    source: ModelArgument = None,
    drain_timeout_s: DrainTimeout = 30.0,
    warmup_file: Annotated[
        Path | None, typer.Option(help="Prompts computed before the first request; see `pagedcore serve`.", show_default=False)
    ] = None,
) -> None:
    """Run an engine alone, at a Unix socket.

    Any number of processes attach to it: pagedcore serve --socket, AsyncEngine.connect(path).
    """
    from pagedcore.commands.engine_process import serve_engine

    serve_engine(with_model(config, source), socket, drain_timeout_s, warmup_file)


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

    engine = AsyncEngine(with_model(config, source))
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
def advise(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="JSON lines, one served request each: see engine.record_trace.", show_default=False)
    ],
    num_blocks: Annotated[int, typer.Option(help="KV blocks of the pool that there is.", min=1, show_default=False)],
    block_size: Annotated[int, typer.Option(help="Tokens of one of its blocks.", min=1)] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Say what the cache did with recorded traffic.

    And what other pools, block sizes and prompts would have done.
    """
    from rich.console import Console

    from pagedcore.commands.advise import advise_for, show

    advice = advise_for(trace, block_size, num_blocks)
    if as_json:
        Console(soft_wrap=True).print_json(data=advice.as_dict())
    else:
        show(Console(soft_wrap=True), advice)


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

    machine, recommendations = examination.examine(model)
    if as_json:
        Console(soft_wrap=True).print_json(data=examination.as_json(machine, recommendations))
    else:
        examination.show(Console(soft_wrap=True), machine, recommendations)


@app.command()
def status(
    url: Annotated[str, typer.Argument(help="Address of a running server, such as http://127.0.0.1:8000.", show_default=False)],
    api_key: Annotated[
        str | None, typer.Option(help="A key of the server.", envvar="PAGEDCORE_API_KEY", metavar="<str>", show_default=False)
    ] = None,
    device_busy: Annotated[float, typer.Option(help="Least share of the last minute in which steps ran, under traffic.")] = 0.70,
    running_share: Annotated[float, typer.Option(help="Share of max_num_seqs at which, while requests wait, the batch is full.")] = 1.0,
    hit_rate: Annotated[float, typer.Option(help="Least prefix cache hit rate, or that share of the ideal one.")] = 0.85,
    ttft_p99: Annotated[float, typer.Option(help="Most seconds to the first token, of 99 in 100 requests.")] = 1.0,
    blocked: Annotated[int, typer.Option(help="Most requests that may wait.")] = 0,
    token_gap: Annotated[float, typer.Option(help="Most seconds between two tokens of an answer before it is said what held it up.")] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Judge a running server by the five numbers people watch.

    Each with its target, a verdict and the next step. Ends with 0 when all is well or idle, with 1 when something needs attention
    or the server does not answer.
    """
    from rich.console import Console

    from pagedcore.commands import status as report
    from pagedcore.console.indicators import Targets

    targets = Targets(
        device_busy=device_busy,
        running_share=running_share,
        hit_rate=hit_rate,
        ttft_p99_s=ttft_p99,
        blocked=blocked,
        token_gap_s=token_gap,
    )
    engines = report.read_status(url, api_key, targets)
    if as_json:
        Console(soft_wrap=True).print_json(data=report.as_json(engines))
    else:
        report.show(Console(soft_wrap=True), engines)
    if any(engine.needs_attention for engine in engines):
        raise typer.Exit(FAILURE_EXIT_CODE)


@app.command()
def trace(
    url: Annotated[str, typer.Argument(help="Address of a running server, such as http://127.0.0.1:8000.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("pagedcore-trace.json"),
    api_key: Annotated[
        str | None, typer.Option(help="A key of the server.", envvar="PAGEDCORE_API_KEY", metavar="<str>", show_default=False)
    ] = None,
) -> None:
    """Save what a running server remembers of its requests and steps.

    The file opens in ui.perfetto.dev and chrome://tracing: a track a request, one for the steps, counters of blocks and batch size.
    """
    from pagedcore.commands.trace import fetch_trace

    typer.echo(fetch_trace(url, output, api_key))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
