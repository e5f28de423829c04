"""`pagedcore bench throughput | latency | prefix | serve | kernels | products | plot` on the command line."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from pagedcore.commands.bench.outputs import Outputs, check_can_write, takes_output_flags
from pagedcore.commands.flags import takes_engine_flags
from pagedcore.commands.model_argument import ModelArgument, with_model
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError

if TYPE_CHECKING:
    from pagedcore.commands.bench.workloads import Load

HELP = "Measure this machine, or a server: a table, JSON, CSV and plots."

RoundsOption = Annotated[int, typer.Option(help="Times that each point is measured; median and spread are shown.", min=1, max=100)]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.", min=0.0)]
PromptTokensOption = Annotated[str, typer.Option(help="Tokens of each prompt (random ids), or a range such as 100-1024.")]
OutputTokensOption = Annotated[str, typer.Option(help="Tokens generated for each prompt, or a range.")]
ShapesOption = Annotated[
    str | None, typer.Option(help="Folder or name whose config.json gives the shapes; None is the embedded model.", show_default=False)
]
KernelDtypeOption = Annotated[
    str, typer.Option(help="Of weights and activations; auto is the checkpoint's.", metavar="auto|float16|bfloat16")
]


class BenchGroup(TyperGroup):
    """Says which command measures what `pagedcore bench` alone once did."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            raise ConfigError(
                f"bench needs the name of what to measure; for throughput type: pagedcore bench throughput {shlex.join(args)}"
            )
        return super().parse_args(ctx, args)


bench_app = typer.Typer(
    name="bench",
    cls=BenchGroup,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@bench_app.command()
@takes_engine_flags
@takes_output_flags
def throughput(
    outputs: Outputs,
    config: EngineConfig,
    source: ModelArgument = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Requests of each point; None is 16, or 4 for each one in flight.", min=1, max=100_000, show_default=False),
    ] = None,
    prompt_tokens: PromptTokensOption = "128",
    shared_tokens: Annotated[int, typer.Option(help="Tokens at the start that all prompts share.", min=0)] = 0,
    output_tokens: OutputTokensOption = "64",
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Requests in flight, one point each, such as 1,8,64; None sends all at once.", metavar="N,N,...", show_default=False
        ),
    ] = None,
    temperature: TemperatureOption = 0.0,
    rounds: RoundsOption = 3,
) -> None:
    """Output tokens a second of many requests."""
    from pagedcore.commands.bench.lengths import parse_counts
    from pagedcore.commands.bench.runs import run_throughput
    from pagedcore.commands.bench.throughput import ThroughputWork

    load = _load(prompt_tokens, output_tokens, shared_tokens, config.seed)
    counts = None if concurrency is None else parse_counts(concurrency, "--concurrency")
    work = ThroughputWork(load=load, num_prompts=num_prompts, concurrency=counts, rounds=rounds)
    outputs.check("throughput")
    outputs.publish(run_throughput(with_model(config, source), work, temperature, outputs.label))


@bench_app.command()
@takes_engine_flags
@takes_output_flags
def latency(
    outputs: Outputs,
    config: EngineConfig,
    source: ModelArgument = None,
    batch: Annotated[str, typer.Option(help="Requests at once, such as 1,8,32.", metavar="N,N,...")] = "1,8",
    context: Annotated[str, typer.Option(help="Tokens of each prompt, such as 128,1024,8192.", metavar="N,N,...")] = "128",
    output_tokens: Annotated[int, typer.Option(help="Tokens generated for each prompt.", min=2)] = 64,
    rounds: RoundsOption = 3,
) -> None:
    """Milliseconds of a token at each batch and context.

    (median time of n tokens - median time of 1) / (n - 1), greedy; and the time until all have their first.
    """
    from pagedcore.commands.bench.latency import LatencyWork
    from pagedcore.commands.bench.lengths import parse_counts
    from pagedcore.commands.bench.runs import run_latency

    work = LatencyWork(
        batches=parse_counts(batch, "--batch"),
        contexts=parse_counts(context, "--context"),
        num_output_tokens=output_tokens,
        rounds=rounds,
        seed=config.seed,
    )
    outputs.check("latency")
    outputs.publish(run_latency(with_model(config, source), work, outputs.label))


@bench_app.command()
@takes_engine_flags
@takes_output_flags
def prefix(
    outputs: Outputs,
    config: EngineConfig,
    source: ModelArgument = None,
    num_prompts: Annotated[int, typer.Option(help="Requests, all sent at once.", min=1, max=100_000)] = 16,
    shared_tokens: Annotated[int, typer.Option(help="Tokens at the start that all prompts share.", min=1)] = 512,
    own_tokens: Annotated[int, typer.Option(help="Tokens of each prompt's own behind them.", min=1)] = 32,
    output_tokens: Annotated[int, typer.Option(help="Tokens generated for each prompt.", min=1)] = 16,
    rounds: RoundsOption = 3,
) -> None:
    """Prompts with a shared beginning: prefix caching on beside off."""
    from pagedcore.commands.bench.lengths import Lengths
    from pagedcore.commands.bench.prefix import PrefixWork
    from pagedcore.commands.bench.runs import run_prefix
    from pagedcore.commands.bench.workloads import Load

    if not config.enable_prefix_caching:
        raise ConfigError("bench prefix measures with and without the prefix cache; leave out --no-enable-prefix-caching.")
    load = Load(
        num_prompts=num_prompts,
        prompt_tokens=Lengths(shared_tokens + own_tokens, shared_tokens + own_tokens),
        output_tokens=Lengths(output_tokens, output_tokens),
        num_shared_tokens=shared_tokens,
        seed=config.seed,
    )
    outputs.check("prefix")
    outputs.publish(run_prefix(with_model(config, source), PrefixWork(load=load, rounds=rounds), outputs.label))


@bench_app.command()
@takes_engine_flags
@takes_output_flags
def serve(
    outputs: Outputs,
    config: EngineConfig,
    source: ModelArgument = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="A running OpenAI-compatible server, without /v1; None starts pagedcore serve on a free port.", show_default=False
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of the server.", envvar="PAGEDCORE_API_KEY", show_default=False)] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Requests of each point; None is 16, 64 at a rate, or 4 for each in flight.", min=1, show_default=False),
    ] = None,
    prompt_tokens: PromptTokensOption = "128",
    shared_tokens: Annotated[int, typer.Option(help="Tokens at the start that the prompts of a round share.", min=0)] = 0,
    output_tokens: OutputTokensOption = "64",
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Streams in flight, one point each, such as 1,8,64; None opens all at once.", metavar="N,N,...", show_default=False
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Arrivals a second (Poisson), one point each, such as 2,4.5.", metavar="N,N,...", show_default=False),
    ] = None,
    temperature: TemperatureOption = 0.0,
    usage_each: Annotated[
        bool,
        typer.Option(
            "--usage-each", help="Ask for a count of tokens in every event (continuous_usage_stats), for exact inter-token times."
        ),
    ] = False,
    client_processes: Annotated[int, typer.Option(help="Processes that send and read.", min=1, max=64)] = 4,
    rounds: RoundsOption = 3,
) -> None:
    """Load an OpenAI-compatible server with streams.

    Tokens a second, first token, inter-token and whole times, as the clients see them. No two rounds share a prompt.
    """
    from pagedcore.commands.bench.lengths import parse_counts, parse_rates
    from pagedcore.commands.bench.serve import ServeWork
    from pagedcore.commands.bench.serve_run import Target, run_serve

    config = with_model(config, source)
    load = _load(prompt_tokens, output_tokens, shared_tokens, config.seed)
    work = ServeWork(
        load=load,
        num_prompts=num_prompts,
        concurrency=None if concurrency is None else parse_counts(concurrency, "--concurrency"),
        rates=None if rate is None else parse_rates(rate, "--rate"),
        temperature=temperature,
        counts_each=usage_each,
        num_processes=client_processes,
        rounds=rounds,
    )
    outputs.check("serve")
    target = Target(url=url, config=config, model=None if url is None else config.model, api_key=api_key)
    outputs.publish(run_serve(target, work, outputs.label))


@bench_app.command()
@takes_output_flags
def kernels(
    outputs: Outputs,
    source: ModelArgument = None,
    model: ShapesOption = None,
    dtype: KernelDtypeOption = "auto",
    rounds: RoundsOption = 5,
) -> None:
    """Share of the roofline: what our kernels reach of this card's speed.

    The card's read and copy bandwidth and matrix products are measured first. Needs an NVIDIA GPU; no weights are loaded.
    """
    from pagedcore.commands.bench.kernel_shares import run_kernels

    config = with_model(EngineConfig(model=model, dtype=dtype, load_format="dummy"), source)
    outputs.check("kernels")
    outputs.publish(run_kernels(config, rounds, outputs.label))


@bench_app.command()
@takes_output_flags
def products(
    outputs: Outputs,
    source: ModelArgument = None,
    model: ShapesOption = None,
    dtype: KernelDtypeOption = "auto",
    bits: Annotated[int, typer.Option(help="Of a packed weight: 4 or 8.", metavar="4|8", min=4, max=8)] = 4,
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale.", min=32)] = 128,
    zero_points: Annotated[
        bool, typer.Option("--zero-points", help="One of each group's own, as in AWQ; else one for all, as in symmetric GPTQ.")
    ] = False,
    rows: Annotated[str, typer.Option(help="Rows of the inputs, such as 1,16,64.", metavar="N,N,...")] = "1,2,4,8,16,32,64,128,256",
    rounds: RoundsOption = 5,
) -> None:
    """Packed weights beside 16-bit ones, from one row to many.

    The products of one layer, of random weights. Needs an NVIDIA GPU; no weights are loaded.
    """
    from pagedcore.commands.bench.kernel_shares import ProductsWork, run_products
    from pagedcore.commands.bench.lengths import parse_counts

    if bits not in (4, 8):
        raise ConfigError(f"--bits is {bits} and must be 4 or 8: these are multiplied packed.")
    config = with_model(EngineConfig(model=model, dtype=dtype, load_format="dummy"), source)
    work = ProductsWork(bits=bits, group_size=group_size, has_zeros=zero_points, rows=parse_counts(rows, "--rows"), rounds=rounds)
    outputs.check("products")
    outputs.publish(run_products(config, work, outputs.label))


@bench_app.command()
def plot(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Files that --json wrote, all of one command.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The plot: .png, .svg or .pdf.", show_default=False)],
) -> None:
    """Draw results again, several runs in one plot."""
    from pagedcore.commands.bench.plots import draw
    from pagedcore.commands.bench.results import read_results

    check_can_write(output)
    draw([read_results(path) for path in files], output)
    typer.echo(f"wrote {output}")


def _load(prompt_tokens: str, output_tokens: str, num_shared_tokens: int, seed: int) -> Load:
    """The load of each point, whose number of prompts is still open. Raises `ConfigError` naming the flag."""
    from pagedcore.commands.bench.lengths import Lengths
    from pagedcore.commands.bench.workloads import Load

    return Load(
        num_prompts=0,
        prompt_tokens=Lengths.parse(prompt_tokens, "--prompt-tokens"),
        output_tokens=Lengths.parse(output_tokens, "--output-tokens"),
        num_shared_tokens=num_shared_tokens,
        seed=seed,
    )
