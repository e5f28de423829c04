"""Plots of results, one or several runs of a command in each."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedcore.commands.bench.results import Command, Point, Results
from pagedcore.commands.bench.spread import Spread
from pagedcore.errors import ConfigError, MissingExtraError
from pagedcore.extras import pip_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = ("#1f5fa8", "#d1603d", "#3a8f5c", "#8a5aa8", "#b8860b", "#4f6d7a", "#c2457f", "#6b8e23")
GRID_COLOUR = "#dddddd"
LINE_STYLES = ("-", "--", ":", "-.")
ROOFS = {
    "read": "reads, of {read_tb_per_s:g} TB/s",
    "copy": "reads and writes, of {copy_tb_per_s:g} TB/s",
    "matmul": "multiplies, of {matmul_tflop_per_s:g} TFLOP/s",
}
"""Name of a roof in the legend."""
LOG_STEP = 4
"""Values of an axis that span this factor or more are drawn on a logarithmic one."""
LABEL_STEP = 1.6
"""Its labels are this factor apart, or more."""
MOST_INSIDE = 6
"""Lines that a legend inside of its panel names: one of more would cover them, and stands below."""


def check_plot_file(path: Path) -> None:
    """Raise `ConfigError` for another suffix, `MissingExtraError` without matplotlib."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"The plot file {str(path)!r} must end with one of {', '.join(SUFFIXES)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(f"Plots need matplotlib, which is not installed: {pip_command('plot')}")


def draw(runs: Sequence[Results], path: Path) -> None:
    """Draw runs of one command and write the file. Raises as `check_plot_file`, and `ConfigError` for runs of several commands."""
    check_plot_file(path)
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):  # text stays text: it can be searched, and the file is a third as large
        make_figure(runs).savefig(path, dpi=160)


def make_figure(runs: Sequence[Results]) -> Figure:
    from matplotlib.figure import Figure

    commands = sorted({run.command for run in runs})
    if len(commands) != 1:
        raise ConfigError(f"One plot shows runs of one command; these are of {', '.join(commands)}.")
    num_panels = NUM_PANELS.get(runs[0].command, 1)
    figure = Figure(figsize=(8.0 if num_panels == 1 else 10.0, _height(runs)), layout="constrained")
    panels = list(figure.subplots(1, num_panels, squeeze=False)[0])
    DRAWN[runs[0].command](*panels, runs)
    panels[0].set_title(heading(runs), loc="left", fontsize=10)
    for axes in panels:
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def heading(runs: Sequence[Results]) -> str:
    """What is drawn, of which model, on which device: what the runs differ in is told by the legend."""
    models = dict.fromkeys(f"{run.facts.get('model')}, {run.facts.get('dtype')}" for run in runs if run.facts.get("model"))
    devices = dict.fromkeys(str(run.facts.get("device")) for run in runs if run.facts.get("device"))
    bars = "" if runs[0].command == "kernels" else "; medians, bars from the lowest to the highest round"
    return f"{WHAT[runs[0].command]}\n{' and '.join(models)}\n{' and '.join(devices)}{bars}"


def _height(runs: Sequence[Results]) -> float:
    if runs[0].command == "products":
        return 5.0 if len(runs) == 1 else 6.2  # the legend stands below
    if runs[0].command != "kernels":
        return 5.0
    return 1.8 + 0.3 * sum(len(run.points) for run in runs)


def _draw_throughput(axes: Axes, runs: Sequence[Results]) -> None:
    for index, run in enumerate(runs):
        _line(axes, run.points, "concurrency", "output_tokens_per_s", label=run.label, color=_colour(index))
    _finish_lines(axes, runs, "concurrency", "requests in flight", "output tokens per second")


def _draw_serve(axes: Axes, runs: Sequence[Results]) -> None:
    x = "rate" if all(point["rate"] is not None for run in runs for point in run.points) else "concurrency"
    for index, run in enumerate(runs):
        _line(axes, run.points, x, "output_tokens_per_s", label=run.label, color=_colour(index))
    label = "arrivals per second (Poisson)" if x == "rate" else "streams in flight"
    _finish_lines(axes, runs, x, label, "output tokens per second")


def _draw_latency(axes: Axes, runs: Sequence[Results]) -> None:
    batches = sorted({int(_number(point["batch"])) for run in runs for point in run.points})
    for run_index, run in enumerate(runs):
        for batch in dict.fromkeys(int(_number(point["batch"])) for point in run.points):
            points = [point for point in run.points if point["batch"] == batch]
            style = {"color": _colour(batches.index(batch)), "linestyle": LINE_STYLES[run_index % len(LINE_STYLES)]}
            _line(axes, points, "context", "per_token_ms", label=f"{run.label}, batch {batch}", **style)
    _finish_lines(axes, runs, "context", "context (prompt tokens)", "milliseconds per output token")


def _draw_prefix(axes: Axes, runs: Sequence[Results]) -> None:
    bars = [(f"{run.label}\ncaching {'on' if p['prefix_caching'] else 'off'}", p, i) for i, run in enumerate(runs) for p in run.points]
    seconds = [_spread(point["wall_s"]) for _, point, _ in bars]
    axes.bar([name for name, _, _ in bars], [s.value for s in seconds], width=0.5, color=[_colour(i) for _, _, i in bars])
    axes.errorbar(range(len(bars)), [s.value for s in seconds], yerr=_errors(seconds), fmt="none", ecolor="#333333", capsize=4)
    for place, (_, point, _) in enumerate(bars):
        axes.annotate(_bar_text(point), (place, seconds[place].high), xytext=(0, 5), textcoords="offset points", ha="center")
    axes.set_ylabel("seconds until the last token")
    axes.grid(True, axis="y", color=GRID_COLOUR, linewidth=0.6)
    axes.margins(y=0.12)


def _draw_kernels(axes: Axes, runs: Sequence[Results]) -> None:
    bars = [(run, point) for run in runs for point in run.points]
    places = range(len(bars), 0, -1)
    groups: dict[str, list[tuple[int, Point]]] = {}
    for place, (run, point) in zip(places, bars, strict=True):
        groups.setdefault(_kernel_group(run, point, runs), []).append((place, point))
    for index, (name, group) in enumerate(groups.items()):
        widths = [100 * _number(point["share"]) for _, point in group]
        drawn = axes.barh([place for place, _ in group], widths, height=0.7, color=_colour(index), label=name)
        labels = [f"{_number(point['rate']):.3g} {point['unit']}" for _, point in group]
        axes.bar_label(drawn, labels=labels, padding=3, fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    axes.set_yticks(places, [f"{point['kernel']}, {point['work']}" for _, point in bars], fontsize=8)
    axes.axvline(100, color="#333333", linewidth=1)
    axes.set_xlim(0, max(118.0, *(115 * _number(point["share"]) for _, point in bars)))
    axes.set_ylim(0.3, len(bars) + 0.7)
    axes.set_xlabel("share of the roof, %")
    axes.grid(True, axis="x", color=GRID_COLOUR, linewidth=0.6)
    axes.figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)


def _kernel_group(run: Results, point: Point, runs: Sequence[Results]) -> str:
    """What a bar's colour tells: of one run the roof, of several the run."""
    return run.label if len(runs) > 1 else ROOFS[str(point["roof"])].format(**run.work)


def _draw_products(time: Axes, gain: Axes, runs: Sequence[Results]) -> None:
    """Left the time of a layer's products, packed and in 16 bit; right how many times as fast packed weights are."""
    matrices = list(dict.fromkeys(str(point["matrix"]) for run in runs for point in run.points))
    for index, run in enumerate(runs):
        style = LINE_STYLES[index % len(LINE_STYLES)]
        layer = layer_points(run.points)
        _line(time, layer, "rows", "us", label=f"{run.label}, {run.work['bits']} bit", color=_colour(index))
        _line(time, layer, "rows", "plain_us", label=f"{run.label}, 16 bit", color=_colour(index), linestyle=":")
        for matrix in matrices:
            points = [point for point in run.points if point["matrix"] == matrix]
            colour = _colour(matrices.index(matrix))
            _line(gain, points, "rows", "speed_up", label=_product_label(run, points, runs), color=colour, linestyle=style)
        _line(gain, layer, "rows", "speed_up", label=_in(runs, run, "a layer's together"), color="#222222", linestyle=style)
    gain.axhline(1.0, color="#999999", linewidth=1)
    _finish_lines(time, runs, "rows", "rows", "microseconds, the products of one layer")
    _finish_lines(gain, runs, "rows", "rows", "times as fast as 16 bit")


def layer_points(points: Sequence[Point]) -> list[Point]:
    """One for each number of rows for which every matrix was measured: their times together."""
    matrices = {point["matrix"] for point in points}
    layer: list[Point] = []
    for rows in sorted({_number(point["rows"]) for point in points}):
        those = [point for point in points if point["rows"] == rows]
        if {point["matrix"] for point in those} == matrices:
            us, plain_us = (_sum([_spread(point[name]) for point in those]) for name in ("us", "plain_us"))
            layer.append({"rows": rows, "us": us, "plain_us": plain_us, "speed_up": plain_us.value / us.value})
    return layer


def _sum(spreads: Sequence[Spread]) -> Spread:
    return Spread(sum(s.value for s in spreads), tuple(map(sum, zip(*(s.rounds for s in spreads), strict=True))))


def _product_label(run: Results, points: Sequence[Point], runs: Sequence[Results]) -> str:
    first = points[0]
    return _in(runs, run, f"{first['matrix']}: {_number(first['in_features']):,g} x {_number(first['out_features']):,g}")


def _in(runs: Sequence[Results], run: Results, what: str) -> str:
    return what if len(runs) == 1 else f"{run.label}, {what}"


def _line(axes: Axes, points: Sequence[Point], x: str, y: str, **style: Any) -> None:
    """Medians, with bars from the fastest to the slowest round."""
    ordered = sorted(points, key=lambda point: _number(point[x]))
    values = [_spread_or_one(point[y]) for point in ordered]
    across = [_number(point[x]) for point in ordered]
    axes.errorbar(across, [v.value for v in values], yerr=_errors(values), marker="o", markersize=4, capsize=3, linewidth=1.6, **style)


def _finish_lines(axes: Axes, runs: Sequence[Results], x: str, x_label: str, y_label: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    places = sorted({_number(point[x]) for run in runs for point in run.points})
    labelled = places
    if len(places) > 1 and places[-1] / places[0] >= LOG_STEP:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        labelled = _apart(places)
    axes.set_xticks(places, [f"{place:,g}" if place in labelled else "" for place in places])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(True, color=GRID_COLOUR, linewidth=0.6)
    lines, _ = axes.get_legend_handles_labels()
    if len(lines) > MOST_INSIDE:
        axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    else:
        axes.legend(frameon=False, fontsize=9)


def _apart(places: Sequence[float]) -> list[float]:
    """Those of a logarithmic axis whose labels stand clear of each other, from the smallest up."""
    kept: list[float] = []
    for place in places:
        if not kept or place / kept[-1] >= LABEL_STEP:
            kept.append(place)
    return kept


def _number(value: object) -> float:
    if isinstance(value, Spread):
        return value.value
    assert isinstance(value, (int, float)), f"{value!r} is no number"
    return float(value)


def _spread(value: object) -> Spread:
    assert isinstance(value, Spread), f"{value!r} is no spread"
    return value


def _spread_or_one(value: object) -> Spread:
    return value if isinstance(value, Spread) else Spread.median_of([_number(value)])


def _errors(spreads: Sequence[Spread]) -> list[list[float]]:
    """Below and above. A value that is made of medians may lie outside of its rounds' pairs."""
    return [[max(0.0, s.value - s.low) for s in spreads], [max(0.0, s.high - s.value) for s in spreads]]


def _bar_text(point: Point) -> str:
    rate = _number(point["hit_rate"])
    seconds = f"{_number(point['wall_s']):.3g} s"
    return f"{seconds}, hit rate {rate:.0%}" if point["prefix_caching"] else seconds


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


NUM_PANELS: dict[Command, int] = {"products": 2}
"""One of the others."""

DRAWN: dict[Command, Callable[..., None]] = {
    "throughput": _draw_throughput,
    "serve": _draw_serve,
    "latency": _draw_latency,
    "prefix": _draw_prefix,
    "kernels": _draw_kernels,
    "products": _draw_products,
}

WHAT: dict[Command, str] = {
    "throughput": "Throughput against batch",
    "serve": "Throughput of the server",
    "latency": "Latency against context",
    "prefix": "Prompts with a shared prefix",
    "kernels": "Kernels: share of the roofline",
    "products": "Speed against rows: packed weights beside 16 bit",
}
