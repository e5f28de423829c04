"""`python -m bench.kernels.w4_results [FILE ...]`: what sweeps of `bench.kernels.w4 --sweep --csv FILE` say of the choices for an H200.

For each matrix and number of rows: the fastest way that was tried, how much longer the choice takes, and how it stands beside 16 bit; then
for bits and rows the mean and the worst. Needs no GPU. Without a file: the sweeps on H200s that are kept here (torch 2.11, triton 3.6,
groups of 128), of each place with the tiles in use, the fastest, and the weights written out. `bench.kernels.w4_fit` finds the times of
tiles with which choices are best.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch

from pagedcore_kernels.packed_weights import PackedWeights
from pagedcore_kernels.triton_ops.attention_common import Card
from pagedcore_kernels.triton_ops.packed_settings import FewRowsConfig, PackedConfig, choose_packed_config

H200 = Card(90, 132)
KEPT = Path(__file__).parents[1] / "results" / "h200-packed-tiles.csv"
GROUP_SIZE = 128
EXPANDED = "expanded"
"""In place of a tile: the weights written out, then torch's product."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One line: microseconds of a product with packed weights, and of the faster one in 16 bit."""

    bits: int
    dtype: str
    asymmetric: bool
    in_features: int
    out_features: int
    rows: int
    tile: str
    splits: int
    us: float
    plain_us: float


@dataclass
class Place:
    """One matrix and number of rows: microseconds of each tile and number of splits that were tried, and of the product in 16 bit."""

    bits: int
    dtype: str
    in_features: int
    out_features: int
    rows: int
    plain_us: float
    us: dict[tuple[str, int], float] = field(default_factory=dict)

    @property
    def best_us(self) -> float:
        return min(self.us.values())

    @property
    def chosen_us(self) -> float | None:
        """None where the choice was not tried."""
        config = choose_packed_config(self.rows, matrix(self.in_features, self.out_features, self.bits), getattr(torch, self.dtype), H200)
        return self.us.get((tile_name(config), config.splits))

    def __str__(self) -> str:
        sizes = f"{self.bits} bits {self.dtype:8} {self.in_features:5}->{self.out_features:<5} {self.rows:3} rows"
        (tile, splits), best_us = min(self.us.items(), key=lambda item: item[1])
        best = f"{sizes}: best {best_us:6.2f} us ({tile} x {splits})"
        if (chosen_us := self.chosen_us) is None:
            return f"{best}; chosen: not tried"
        return f"{best}; chosen {chosen_us:6.2f}, {chosen_us / best_us:4.2f} of it, {self.plain_us / chosen_us:4.2f}x 16 bit"


def tile_name(config: PackedConfig) -> str:
    """All of a configuration but its splits, short."""
    if isinstance(config, FewRowsConfig):
        registers = "" if config.max_registers is None else f" r{config.max_registers}"
        return f"few {config.block_n} {config.num_warps} {config.num_stages} m{config.block_m}{registers}"
    return f"many {config.block_m} {config.block_n} {config.step} {config.num_warps} {config.num_stages}"


def matrix(in_features: int, out_features: int, bits: int = 4) -> PackedWeights:
    """Without contents."""
    words = torch.empty(out_features // 64, in_features * bits // 1024, 64, 64, dtype=torch.int16, device="meta")
    scales = torch.empty(in_features // GROUP_SIZE, out_features, device="meta")
    return PackedWeights(words, scales, out_features, in_features, GROUP_SIZE, 1 << (bits - 1), bits)


def append(lines: Iterable[Measured], path: Path) -> None:
    names = [column.name for column in fields(Measured)]
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(
            {**asdict(line), "asymmetric": int(line.asymmetric), "us": f"{line.us:.2f}", "plain_us": f"{line.plain_us:.2f}"}
            for line in lines
        )


def read(*paths: Path) -> list[Place]:
    """By bits, type, shape and rows, places with a tile. Of several lines for one way the mean counts, with one zero point for all or of
    each group alike; of 16 bit the least.
    """
    lines: dict[tuple[int, str, int, int, int], list[Measured]] = defaultdict(list)
    for path in paths:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                one = measured_of(row)
                lines[one.bits, one.dtype, one.in_features, one.out_features, one.rows].append(one)
    return [place for key in sorted(lines) if (place := place_of(lines[key])).us]


def measured_of(row: dict[str, str]) -> Measured:
    sizes = (int(row["in_features"]), int(row["out_features"]), int(row["rows"]))
    return Measured(
        int(row["bits"]),
        row["dtype"],
        row["asymmetric"] == "1",
        *sizes,
        row["tile"],
        int(row["splits"]),
        float(row["us"]),
        float(row["plain_us"]),
    )


def place_of(lines: list[Measured]) -> Place:
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for line in lines:
        if line.tile != EXPANDED:
            times[line.tile, line.splits].append(line.us)
    first = lines[0]
    place = Place(first.bits, first.dtype, first.in_features, first.out_features, first.rows, min(line.plain_us for line in lines))
    place.us = {way: statistics.fmean(us) for way, us in times.items()}
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", default=[KEPT])
    ratios: dict[tuple[int, int], list[float]] = defaultdict(list)
    for place in read(*parser.parse_args().files):
        print(place)
        if (chosen_us := place.chosen_us) is not None:
            ratios[place.bits, place.rows].append(chosen_us / place.best_us)
    for (bits, rows), found in sorted(ratios.items()):
        mean, most = statistics.fmean(found), max(found)
        print(f"{bits} bits, {rows:3} rows: {len(found):2} places, chosen takes {mean:.3f} of the fastest, at most {most:.3f}")


if __name__ == "__main__":
    main()
