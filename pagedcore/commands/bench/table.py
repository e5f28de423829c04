"""Results as a table: a line a point, and below it what was timed on what."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pagedcore.commands.bench.results import Command, Fact, Point, Results
from pagedcore.commands.bench.spread import Spread

if TYPE_CHECKING:
    from rich.console import Console

Column = tuple[str, Callable[[Point], str]]
"""Header (two lines), and a point's cell."""


def show(console: Console, results: Results) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title=title(results),
        title_justify="left",
        caption=caption(results),
        caption_justify="left",
    )
    columns = COLUMNS[results.command]
    for header, _ in columns:
        table.add_column(header, justify="right", overflow="fold")
    for point in results.points:
        table.add_row(*(cell(point) for _, cell in columns))
    console.print(table)


def title(results: Results) -> str:
    facts = results.facts
    about = [str(facts[name]) for name in ("model", "dtype", "quantization") if facts.get(name)]
    return f"pagedcore bench {results.command}: {', '.join(about)}"


def caption(results: Results) -> str:
    """Where it was measured, what is timed, on what work."""
    facts = results.facts
    versions = [f"{name} {facts[name]}" for name in ("pagedcore", "commit", "torch", "triton") if facts.get(name)]
    where = ". ".join([str(facts["device"]), ", ".join(versions)])
    work = ", ".join(f"{name} {_plain(value)}" for name, value in results.work.items() if value is not None)
    return f"{where}.\n{TIMED[results.command]}\n{work}."


def number(value: float, digits: int = 1) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else "-"


def significant(value: float) -> str:
    """Three digits where there are fewer before the point."""
    if not math.isfinite(value):
        return "-"
    return number(value, 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2)


def _plain(value: Fact) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _value(name: str) -> Callable[[Point], str]:
    return lambda point: _one(point[name])


def _range(name: str) -> Callable[[Point], str]:
    return lambda point: _span(point[name])


def _pair(first: str, second: str) -> Callable[[Point], str]:
    return lambda point: f"{_one(point[first])}/{_one(point[second])}"


def _percent(name: str) -> Callable[[Point], str]:
    def cell(point: Point) -> str:
        value = point[name]
        share = value.value if isinstance(value, Spread) else float(value or 0)
        return f"{share:.0%}" if math.isfinite(share) else "-"

    return cell


def _one(value: Fact | Spread) -> str:
    if isinstance(value, Spread):
        return significant(value.value)
    if isinstance(value, float):
        return significant(value)
    return "-" if value is None else _plain(value)


def _span(value: Fact | Spread) -> str:
    return f"{significant(value.low)}–{significant(value.high)}" if isinstance(value, Spread) else _one(value)


def _rate(point: Point) -> str:
    return f"{_one(point['rate'])} {point['unit']}"


def _sizes(point: Point) -> str:
    return f"{point['in_features']} x {point['out_features']}"


def _caching(point: Point) -> str:
    return "on" if point["prefix_caching"] else "off"


COLUMNS: dict[Command, Sequence[Column]] = {
    "throughput": (
        ("in\nflight", _value("concurrency")),
        ("output\ntokens/s", _value("output_tokens_per_s")),
        ("range of\nrounds", _range("output_tokens_per_s")),
        ("first token\nms p50/p99", _pair("first_token_p50_ms", "first_token_p99_ms")),
        ("per token\nms p50/p99", _pair("per_token_p50_ms", "per_token_p99_ms")),
        ("from\ncache", _percent("cached_fraction")),
    ),
    "latency": (
        ("batch", _value("batch")),
        ("context", _value("context")),
        ("ms per\ntoken", _value("per_token_ms")),
        ("range of\nrounds", _range("per_token_ms")),
        ("first token\nof all, ms", _value("first_token_ms")),
        ("range of\nrounds", _range("first_token_ms")),
    ),
    "prefix": (
        ("prefix\ncaching", _caching),
        ("seconds", _value("wall_s")),
        ("range of\nrounds", _range("wall_s")),
        ("output\ntokens/s", _value("output_tokens_per_s")),
        ("first token\nms p50/p99", _pair("first_token_p50_ms", "first_token_p99_ms")),
        ("hit\nrate", _percent("hit_rate")),
    ),
    "serve": (
        ("load", _value("load")),
        ("output\ntokens/s", _value("output_tokens_per_s")),
        ("range of\nrounds", _range("output_tokens_per_s")),
        ("first token\nms p50/p99", _pair("first_token_p50_ms", "first_token_p99_ms")),
        ("inter-token\nms p50/p99", _pair("inter_token_p50_ms", "inter_token_p99_ms")),
        ("settled\nms p99", _value("settled_inter_token_p99_ms")),
        ("whole s\np50/p99", _pair("end_to_end_p50_s", "end_to_end_p99_s")),
    ),
    "kernels": (
        ("kernel", _value("kernel")),
        ("work", _value("work")),
        ("us", _value("us")),
        ("range of\nrounds", _range("us")),
        ("reached", _rate),
        ("of the\nroof", _percent("share")),
    ),
    "products": (
        ("matrix", _value("matrix")),
        ("inputs x\noutputs", _sizes),
        ("rows", _value("rows")),
        ("packed\nus", _value("us")),
        ("range of\nrounds", _range("us")),
        ("16 bit\nus", _value("plain_us")),
        ("speed-\nup", _value("speed_up")),
        ("of the\nread roof", _percent("share")),
    ),
}

EMPTY = "the prefix cache is empty before each round."

TIMED: dict[Command, str] = {
    "throughput": f"Timed: from before the first request is sent until the last has its last token; {EMPTY}",
    "latency": f"Timed: (median time of n tokens - median time of 1) / (n - 1), whole batches sent at once; {EMPTY}",
    "prefix": f"Timed: all requests sent at once, until the last has its last token; {EMPTY}",
    "serve": "Timed in the clients: all from when a request was due; inter-token times a token; "
    "settled: of those after the last first token; tokens as the server's usage counts.",
    "kernels": (
        "Timed: replays of a CUDA graph (prefill: calls), past the L2 cache. The roof is what this card reached just before. "
        "Work: sequences x tokens; linear: rows x inputs x outputs."
    ),
    "products": (
        "Timed: CUDA graphs, past the L2 cache, with packed weights and with 16-bit ones, each as the engine multiplies with them. "
        "The roof: reading the packed weights once."
    ),
}
