"""`python -m bench.kernels.w4_results FILE [--plot docs/images/w4_rows.svg]`: what a sweep of `bench.kernels.w4 --sweep --json FILE` says.

For each matrix and number of rows: the fastest way that was tried, and how much longer the settings' choice takes, and the rule's that
stands in where nothing was measured. --plot draws the fastest ways beside torch's product with a 16-bit matrix. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pagedcore.commands.bench.plots import COLOURS, GRID_COLOUR, check_plot_file
from pagedcore_kernels.packed_weights import PackedWeights
from pagedcore_kernels.triton_ops.attention_common import Card
from pagedcore_kernels.triton_ops.packed_settings import choose_packed_config, config_by_rule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

H200 = Card(90, 132)
GROUP_SIZE = 128


@dataclass
class Place:
    """One matrix and number of rows: microseconds of each way that was tried, and of torch's product."""

    in_features: int
    out_features: int
    rows: int
    plain_us: float
    us: dict[str, float] = field(default_factory=dict)

    @property
    def best_us(self) -> float:
        return min(self.us.values())

    def __str__(self) -> str:
        weights = matrix(self.in_features, self.out_features)
        table, rule = (self._ratio(repr(choose(self.rows, weights, H200))) for choose in (choose_packed_config, config_by_rule))
        gain = self.plain_us / self.best_us
        return (
            f"{self.in_features:5}->{self.out_features:<5} {self.rows:3} rows: best {self.best_us:6.2f} us, {gain:4.2f}x torch; "
            f"chosen {table}, rule {rule} of the best"
        )

    def _ratio(self, way: str) -> str:
        return f"{self.us[way] / self.best_us:.2f}x" if way in self.us else "not tried"


def matrix(in_features: int, out_features: int) -> PackedWeights:
    """Of 4 bits, without contents."""
    words = torch.empty(out_features // 64, in_features // 256, 64, 64, dtype=torch.int16, device="meta")
    scales = torch.empty(in_features // GROUP_SIZE, out_features, device="meta")
    return PackedWeights(words, scales, out_features, in_features, GROUP_SIZE, 8)


def read(path: Path) -> list[Place]:
    """By shape, then rows. Of two lines for one way the later one counts."""
    places: dict[tuple[int, int, int], Place] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        key = (line["in_features"], line["out_features"], line["rows"])
        places.setdefault(key, Place(*key, line["plain_us"])).us[line["way"]] = line["us"]
    return [places[key] for key in sorted(places)]


def draw(places: list[Place]) -> Figure:
    """Time against rows, and beside it the speed-up over 16 bit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.4), layout="constrained")
    time, gain = figure.subplots(1, 2)
    by_shape: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        by_shape[f"{place.in_features:,} x {place.out_features:,}"].append(place)
    for colour, (name, line) in zip(COLOURS, by_shape.items(), strict=False):
        rows = [place.rows for place in line]
        time.plot(rows, [place.best_us for place in line], color=colour, marker="o", markersize=4, label=name)
        time.plot(rows, [place.plain_us for place in line], color=colour, linestyle="--", linewidth=1)
        gain.plot(rows, [place.plain_us / place.best_us for place in line], color=colour, marker="o", markersize=4, label=name)
    gain.axhline(1.0, color="#333333", linewidth=1)
    time.set_yscale("log", base=2)
    _finish(time, places, "microseconds a product (dashed: 16 bit, cuBLAS)")
    _finish(gain, places, "speed-up over 16 bit")
    gain.set_ylim(bottom=0)
    return figure


def _finish(axes: Axes, places: list[Place], y_label: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    rows = sorted({place.rows for place in places})
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(count) for count in rows])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("rows")
    axes.set_ylabel(y_label)
    axes.set_axisbelow(True)
    axes.grid(True, color=GRID_COLOUR, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, title="4-bit weights, in x out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--plot", type=Path, help="write the plot to this file")
    args = parser.parse_args()
    places = read(args.file)
    for place in places:
        print(place)
    if args.plot:
        check_plot_file(args.plot)
        draw(places).savefig(args.plot, dpi=130)


if __name__ == "__main__":
    main()
