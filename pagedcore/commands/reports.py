"""Commands that look at something, say what they saw and end: two models, a trace, this machine, a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pagedcore.commands.flags import takes_engine_flags
from pagedcore.config import EngineConfig
from pagedcore.errors import ConfigError

ServerUrl = Annotated[str, typer.Argument(help="Address of a running server, such as http://127.0.0.1:8000.", show_default=False)]
ApiKey = Annotated[str | None, typer.Option(help="A key of the server.", envvar="PAGEDCORE_API_KEY", metavar="<str>", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
ATTENTION_EXIT_CODE = 1


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
    as_json: AsJson = False,
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
        _print_json(comparison.as_json())
    else:
        show(Console(), comparison)


def advise(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="JSON lines, one served request each: see engine.record_trace.", show_default=False)
    ],
    num_blocks: Annotated[int, typer.Option(help="KV blocks of the pool that there is.", min=1, show_default=False)],
    block_size: Annotated[int, typer.Option(help="Tokens of one of its blocks.", min=1)] = 16,
    as_json: AsJson = False,
) -> None:
    """Say what the cache did with recorded traffic.

    And what other pools, block sizes and prompts would have done.
    """
    from rich.console import Console

    from pagedcore.commands.advise import advise_for, show

    advice = advise_for(trace, block_size, num_blocks)
    if as_json:
        _print_json(advice.as_dict())
    else:
        show(Console(soft_wrap=True), advice)


def doctor(
    model: Annotated[
        Path | None, typer.Option(help="Local model folder to advise for; none is the embedded model.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine can do.

    And which block_size and max_num_seqs fit it, with the reasons.
    """
    from rich.console import Console

    from pagedcore.commands import doctor as examination

    machine, recommendations = examination.examine(model)
    if as_json:
        _print_json(examination.as_json(machine, recommendations))
    else:
        examination.show(Console(soft_wrap=True), machine, recommendations)


def status(
    url: ServerUrl,
    api_key: ApiKey = None,
    device_busy: Annotated[float, typer.Option(help="Least share of the last minute in which steps ran, under traffic.")] = 0.70,
    running_share: Annotated[float, typer.Option(help="Share of max_num_seqs at which, while requests wait, the batch is full.")] = 1.0,
    hit_rate: Annotated[float, typer.Option(help="Least prefix cache hit rate, or that share of the ideal one.")] = 0.85,
    ttft_p99: Annotated[float, typer.Option(help="Most seconds to the first token, of 99 in 100 requests.")] = 1.0,
    blocked: Annotated[int, typer.Option(help="Most requests that may wait.")] = 0,
    token_gap: Annotated[float, typer.Option(help="Most seconds between two tokens of an answer before it is said what held it up.")] = 0.5,
    as_json: AsJson = False,
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
        _print_json(report.as_json(engines))
    else:
        report.show(Console(soft_wrap=True), engines)
    if any(engine.needs_attention for engine in engines):
        raise typer.Exit(ATTENTION_EXIT_CODE)


def trace(
    url: ServerUrl,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("pagedcore-trace.json"),
    api_key: ApiKey = None,
) -> None:
    """Save what a running server remembers of its requests and steps.

    The file opens in ui.perfetto.dev and chrome://tracing: a track a request, one for the steps, counters of blocks and batch size.
    """
    from pagedcore.commands.trace import fetch_trace

    typer.echo(fetch_trace(url, output, api_key))


def _print_json(data: dict[str, Any] | list[Any]) -> None:
    from rich.console import Console

    Console(soft_wrap=True).print_json(data=data)
