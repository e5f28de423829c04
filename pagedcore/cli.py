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
from pagedcore.commands.reports import advise, compare, doctor, status, trace
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
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose web pages may call this server from a browser, such as https://example.org, or * for all. May be repeated.",
            envvar="PAGEDCORE_CORS_ORIGINS",
            metavar="ORIGIN",
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
        cors_origins=tuple(cors_origin or ()),
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


for report in (compare, advise, doctor, status, trace):
    app.command()(report)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
