"""`python -m bench.kernels.w4_fit [FILE ...] [--steps 3000]`: times of the tiles in use with which the settings choose best.

From sweeps of `bench.kernels.w4 --sweep --csv FILE`; without a file, those on an H200 that are kept here. For each number of bits and
bucket of rows: begins with the times in use, changes a few at random and keeps what lowers the sum of

- what choices take beside the fastest that was measured: the mean, and 0.3 of the worst,
- 0.7 of the error of the predicted times, as the root of the mean squared logarithm; slow ways count less.

Prints the tiles as `packed_settings.LARGE_TILES` has them. Needs no GPU; takes a minute. Which tiles to choose from is for who runs it:
one that is fastest nowhere costs more than it gains.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.progress import track

from bench.kernels.w4_results import H200, KEPT, Place, matrix, read, tile_name
from pagedcore_kernels.triton_ops.packed_settings import (
    LARGE_TILES,
    SPLITS,
    FewRowsConfig,
    ManyRowsConfig,
    ProductSize,
    Tile,
    bucket_of,
    most_splits,
    product_us,
    tiles_of,
)

TIMES = ("alone_us", "shared_us", "other_us", "split_us")
WORST_WEIGHT = 0.3
ERROR_WEIGHT = 0.7
SPREAD = 0.25
"""Standard deviation of the logarithm of a change."""


@dataclass(frozen=True, slots=True)
class Score:
    """How well tiles with their times choose: what choices take beside the fastest, mean and worst, and the error of predictions."""

    mean: float
    worst: float
    error: float

    @property
    def total(self) -> float:
        return self.mean + WORST_WEIGHT * self.worst + ERROR_WEIGHT * self.error


def score(tiles: list[Tile], places: list[Place]) -> Score:
    ratios, errors = [], []
    for place in places:
        packed = matrix(place.in_features, place.out_features, place.bits)
        size = ProductSize(bucket_of(place.rows), place.out_features, packed.num_blocks, packed.block_size)
        predicted = {
            (tile_name(tile.config), splits): product_us(tile, splits, size, H200)
            for tile in tiles
            if tile.dtype in (None, getattr(torch, place.dtype))
            for splits in SPLITS
            if splits <= most_splits(size) and (tile_name(tile.config), splits) in place.us
        }
        best_us = place.best_us
        ratios.append(place.us[min(predicted, key=predicted.__getitem__)] / best_us)
        errors += [(best_us / place.us[way]) ** 2 * math.log(us / place.us[way]) for way, us in predicted.items()]
    return Score(statistics.fmean(ratios), max(ratios), math.sqrt(statistics.fmean(error * error for error in errors)))


def fit(tiles: list[Tile], places: list[Place], num_steps: int, name: str) -> tuple[list[Tile], Score]:
    """`tiles` with the times that were found, and how well they choose. Each place must have one of the tiles."""
    draw = random.Random(0)
    best = score(tiles, places)
    for _ in track(range(num_steps), name, transient=True):
        changed = list(tiles)
        for _ in range(draw.choice((1, 1, 2, 3))):
            index, name_of_time = draw.randrange(len(tiles)), draw.choice(TIMES)
            value = getattr(changed[index], name_of_time) * math.exp(draw.gauss(0, SPREAD))
            changed[index] = replace(changed[index], **{name_of_time: max(0.01, round(value, 2))})
        found = score(changed, places)
        if found.total <= best.total:
            tiles, best = changed, found
    return tiles, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", default=[KEPT])
    parser.add_argument("--steps", type=int, default=3000, help="changes that are tried for each bucket of rows")
    arguments = parser.parse_args()
    buckets: dict[tuple[int, tuple[Tile, ...]], list[Place]] = defaultdict(list)
    for place in read(*arguments.files):
        tiles = tiles_of(LARGE_TILES[place.bits], place.rows)
        if {tile_name(tile.config) for tile in tiles} & {name for name, _ in place.us}:
            buckets[place.bits, tiles].append(place)
        else:
            print(f"left out, as none of its tiles is in use: {place}")
    for (bits, tiles), places in sorted(buckets.items(), key=lambda item: (item[0][0], item[1][0].rows)):
        name = f"{bits} bits, rows {sorted({place.rows for place in places})}"
        fitted, found = fit(list(tiles), places, arguments.steps, name)
        print(f"{name}: {len(places)} places, mean {found.mean:.3f}, worst {found.worst:.3f}, error {found.error:.3f}")
        for tile in fitted:
            print(f"    {code_of(tile)},", flush=True)


def code_of(tile: Tile) -> str:
    """As `packed_settings` has it, but for arguments that need not be named there."""
    default = FewRowsConfig(0) if isinstance(tile.config, FewRowsConfig) else ManyRowsConfig(0, 0, 0)
    given = [f"{name}={value}" for name, value in asdict(tile.config).items() if value != getattr(default, name)]
    kind = "_FEW" if isinstance(tile.config, FewRowsConfig) else "_MANY"
    times = ", ".join(str(getattr(tile, name)) for name in TIMES)
    return f"Tile({kind}({', '.join(given)}), {tile.programs_at_once}, {times}{'' if tile.dtype is None else f', {tile.dtype}'})"


if __name__ == "__main__":
    main()
