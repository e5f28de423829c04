"""`pagedcore bench`: what is drawn."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pagedcore.commands.bench.outputs import Outputs
from pagedcore.commands.bench.plots import check_plot_file, draw, make_figure
from pagedcore.commands.bench.results import Results, write_json
from pagedcore.errors import ConfigError, MissingExtraError
from pagedcore.extras import pip_command
from support.bench_runs import ALL, latency_point, product_point, results, serve_point, throughput_point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="the extra plot is not installed")

OURS = results("throughput", [throughput_point(n, 100.0 * n, 120.0 * n, 105.0 * n) for n in (1, 8, 64)])
PEER = results("throughput", [throughput_point(n, 90.0 * n) for n in (1, 8)], label="peer 1.0")


@needs_matplotlib
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
@pytest.mark.parametrize("run", ALL, ids=lambda run: run.command)
def test_each_command_is_drawn(run: Results, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plot.{suffix}"
    draw([run], path)
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert path.read_bytes().startswith(starts[suffix])
    assert path.stat().st_size > 4000


@needs_matplotlib
def test_throughput_is_a_line_of_medians_for_each_run() -> None:
    (axes,) = make_figure([OURS, PEER]).axes
    lines = [container.lines[0] for container in axes.containers]
    assert [list(line.get_xdata()) for line in lines] == [[1, 8, 64], [1, 8]]
    assert [list(line.get_ydata()) for line in lines] == [[105, 840, 6720], [90, 720]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["pagedcore 0.1.0", "peer 1.0"]
    assert axes.get_xlabel() == "requests in flight"
    assert axes.get_ylabel() == "output tokens per second"
    assert axes.get_ylim()[0] == 0


@needs_matplotlib
def test_bars_reach_from_the_lowest_to_the_highest_round() -> None:
    (axes,) = make_figure([OURS]).axes
    (bars,) = axes.containers[0].lines[2]
    assert [[float(y) for _, y in segment] for segment in bars.get_segments()] == [[100, 120], [800, 960], [6400, 7680]]


@needs_matplotlib
def test_the_title_names_what_the_model_and_the_card() -> None:
    (axes,) = make_figure([OURS]).axes
    assert axes.get_title(loc="left").splitlines() == [
        "Throughput against batch",
        "Qwen3-0.6B, bfloat16",
        "NVIDIA H200; medians, bars from the lowest to the highest round",
    ]


@needs_matplotlib
def test_latency_is_a_line_for_each_batch_of_each_run_and_a_batch_keeps_its_colour() -> None:
    ours = results("latency", [latency_point(b, c, 1.0) for b in (1, 8) for c in (128, 1024)])
    peer = results("latency", [latency_point(8, c, 2.0) for c in (128, 1024)], label="peer")
    (axes,) = make_figure([ours, peer]).axes
    lines = [container.lines[0] for container in axes.containers]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["pagedcore 0.1.0, batch 1", "pagedcore 0.1.0, batch 8", "peer, batch 8"]
    assert lines[1].get_color() == lines[2].get_color() != lines[0].get_color()
    assert lines[1].get_linestyle() != lines[2].get_linestyle()


@needs_matplotlib
def test_prefix_is_a_bar_with_and_one_without_the_cache() -> None:
    (axes,) = make_figure([ALL[2]]).axes
    assert [bar.get_height() for bar in axes.patches] == [1.35, 12.35]
    assert [text.get_text() for text in axes.texts] == ["1.35 s, hit rate 90%", "12.3 s"]


@needs_matplotlib
def test_a_server_at_rates_is_drawn_over_the_rates() -> None:
    run = results("serve", [serve_point("2 a second", 64, 2.0, 100.0), serve_point("4 a second", 64, 4.0, 150.0)])
    (axes,) = make_figure([run]).axes
    assert axes.get_xlabel() == "arrivals per second (Poisson)"
    assert list(axes.containers[0].lines[0].get_xdata()) == [2, 4]


@needs_matplotlib
def test_kernels_are_bars_of_their_share() -> None:
    figure = make_figure([ALL[4]])
    (axes,) = figure.axes
    widths = {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in axes.patches}
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["decode attention, 64 x 3584 x 152064", "linear logits, 64 x 3584 x 152064"]
    assert [widths[int(place)] for place in axes.get_yticks()] == [94, 84]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["reads, of 4.37 TB/s"]


@needs_matplotlib
def test_kernels_of_several_runs_have_a_colour_each() -> None:
    figure = make_figure([ALL[4], results("kernels", ALL[4].points, label="before")])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["pagedcore 0.1.0", "before"]
    assert len(figure.axes[0].patches) == 4


@needs_matplotlib
def test_products_are_a_layers_time_and_times_as_fast_as_16_bit_against_rows() -> None:
    points = [product_point("qkv", 1, 10.0, 25.0), product_point("down", 1, 5.0, 15.0), product_point("qkv", 64, 20.0, 30.0)]
    run = results("products", [*points, product_point("down", 64, 40.0, 20.0)])
    time, gain = make_figure([run]).axes
    assert (time.get_xlabel(), gain.get_xlabel(), gain.get_ylabel()) == ("rows", "rows", "times as fast as 16 bit")
    assert _lines(time) == [([1, 64], [15, 60]), ([1, 64], [40, 50])]
    assert _lines(gain) == [([1, 64], [2.5, 1.5]), ([1, 64], [3, 0.5]), ([1, 64], [40 / 15, 50 / 60])]
    assert [text.get_text() for text in time.get_legend().get_texts()] == ["pagedcore 0.1.0, 4 bit", "pagedcore 0.1.0, 16 bit"]
    assert [text.get_text() for text in gain.get_legend().get_texts()] == [
        "qkv: 4,096 x 12,288",
        "down: 4,096 x 12,288",
        "a layer's together",
    ]


@needs_matplotlib
def test_a_layers_time_is_drawn_where_each_matrix_was_measured_and_runs_are_told_apart() -> None:
    points = [product_point("qkv", 1, 10.0, 25.0), product_point("down", 1, 5.0, 15.0), product_point("qkv", 64, 20.0, 30.0)]
    time, gain = make_figure([results("products", points), results("products", points, label="awq")]).axes
    assert _lines(time) == [([1], [15]), ([1], [40])] * 2
    labels = [text.get_text() for text in gain.get_legend().get_texts()]
    assert labels[2:4] == ["pagedcore 0.1.0, a layer's together", "awq, qkv: 4,096 x 12,288"]


@needs_matplotlib
def test_labels_of_near_numbers_of_rows_and_a_long_legend_cover_nothing() -> None:
    points = [product_point(name, rows, 10.0, 25.0) for name in ("qkv", "out", "down") for rows in (64, 96, 128, 160, 192, 256)]
    figure = make_figure([results("products", points), results("products", points, label="awq")])
    figure.draw_without_rendering()
    _, gain = figure.axes
    assert [text.get_text() for text in gain.get_xticklabels()] == ["64", "", "128", "", "", "256"]
    assert gain.get_legend().get_window_extent().y1 < gain.get_window_extent().y0


def _lines(axes: Axes) -> list[tuple[list[float], list[float]]]:
    return [(list(container.lines[0].get_xdata()), list(container.lines[0].get_ydata())) for container in axes.containers]


@needs_matplotlib
def test_runs_of_several_commands_are_refused() -> None:
    with pytest.raises(ConfigError, match="these are of latency, throughput"):
        make_figure([ALL[0], ALL[1]])


@needs_matplotlib
def test_an_earlier_run_is_drawn_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(PEER, tmp_path / "peer.json")
    outputs = Outputs(plot=tmp_path / "plot.svg", beside=(tmp_path / "peer.json",))
    outputs.check("throughput")
    outputs.publish(OURS)
    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert ">pagedcore 0.1.0</text>" in drawn
    assert ">peer 1.0</text>" in drawn
    with pytest.raises(ConfigError, match="holds results of bench throughput; --beside needs some of bench latency"):
        outputs.check("latency")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=re.escape(pip_command("plot"))):
        check_plot_file(Path("plot.png"))
