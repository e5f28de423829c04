"""`python -m bench.kernels.w4_results FILE`: what a sweep of `bench.kernels.w4 --sweep --json FILE` says.

For each matrix and number of rows: the fastest way that was tried, and how much longer the settings' choice takes, and the rule's that
stands in where nothing was measured. Needs no GPU; `pagedcore bench products` draws what the choices reach.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pagedcore_kernels.packed_weights import PackedWeights
from pagedcore_kernels.triton_ops.attention_common import Card
from pagedcore_kernels.triton_ops.packed_settings import choose_packed_config, config_by_rule

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    for place in read(parser.parse_args().file):
        print(place)


if __name__ == "__main__":
    main()
