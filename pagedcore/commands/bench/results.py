"""The results of one run, as a file: JSON that can be read back and drawn again, and CSV with one line a point."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pagedcore.commands.bench.spread import Spread
from pagedcore.errors import ConfigError

Command = Literal["throughput", "latency", "prefix", "serve", "kernels", "products"]
Fact = str | int | float | bool | None
Point = Mapping[str, Fact | Spread]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What one command measured, where, and on what work."""

    command: Command
    label: str
    """Name of the run in a plot."""
    facts: Mapping[str, Fact]
    """Machine, versions, model."""
    work: Mapping[str, Fact]
    """What was asked, the same for every point."""
    points: Sequence[Point]

    def as_json(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "label": self.label,
            "facts": dict(self.facts),
            "work": dict(self.work),
            "points": [{name: _as_json(value) for name, value in point.items()} for point in self.points],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Results:
        """Raises `KeyError`, `TypeError` or `ValueError` for what `as_json` did not make."""
        if data["command"] not in get_args(Command):
            raise ValueError(f"there is no command {data['command']!r}")
        points = [{name: _from_json(value) for name, value in point.items()} for point in data["points"]]
        return cls(command=data["command"], label=str(data["label"]), facts=dict(data["facts"]), work=dict(data["work"]), points=points)


def write_json(results: Results, path: Path) -> None:
    """Write what `read_results` reads. Raises `OSError`."""
    path.write_text(json.dumps(results.as_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_csv(results: Results, path: Path) -> None:
    """One line a point, the facts on each. A spread is three columns: its value, `_low` and `_high`. Raises `OSError`."""
    common = {"command": results.command, "label": results.label, **results.facts, **results.work}
    lines = [{**common, **_flat(point)} for point in results.points]
    names = list(dict.fromkeys(name for line in lines for name in line))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(lines)


def read_results(path: Path) -> Results:
    """Read what `write_json` wrote. Raises `ConfigError` for another file."""
    try:
        return Results.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"The results file {str(path)!r} cannot be read: {error.strerror}.") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"The file {str(path)!r} holds no results of pagedcore bench; give one that --json wrote.") from error


def _as_json(value: Fact | Spread) -> Any:
    if isinstance(value, Spread):
        numbers = {"value": value.value, "low": value.low, "high": value.high}
        return {**{name: _as_json(number) for name, number in numbers.items()}, "rounds": [_as_json(number) for number in value.rounds]}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(value: Any) -> Fact | Spread:
    if not isinstance(value, Mapping):
        fact: Fact = value
        return fact
    rounds = tuple(_number(number) for number in value["rounds"])
    return Spread(_number(value["value"]), rounds)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _flat(point: Point) -> dict[str, Fact]:
    flat: dict[str, Fact] = {}
    for name, value in point.items():
        if isinstance(value, Spread):
            flat |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
        else:
            flat[name] = value
    return flat
