"""Where the results of a run go: a table always; a JSON file, a CSV file and a plot where asked for."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pagedcore.commands.bench.plots import check_plot_file, draw
from pagedcore.commands.bench.results import Results, read_results, write_csv, write_json
from pagedcore.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What was asked for. Nothing is measured for a file that cannot be written."""

    json: Path | None = None
    csv: Path | None = None
    plot: Path | None = None
    beside: tuple[Path, ...] = ()
    label: str | None = None
    commit: str | None = None

    def check(self, command: str) -> None:
        """Raise `ConfigError` or `MissingExtraError` for what could not be made after the run."""
        for path in (self.json, self.csv, self.plot):
            if path is not None:
                check_can_write(path)
        if self.beside and self.plot is None:
            raise ConfigError("--beside adds earlier runs to a plot; give --plot too.")
        if self.plot is not None:
            check_plot_file(self.plot)
        for path in self.beside:
            earlier = read_results(path)
            if earlier.command != command:
                raise ConfigError(f"{str(path)!r} holds results of bench {earlier.command}; --beside needs some of bench {command}.")

    def publish(self, results: Results) -> None:
        """Write the files, then print the table."""
        from rich.console import Console

        from pagedcore.commands.bench.table import show

        if self.commit is not None and results.facts.get("commit") is None:
            results = replace(results, facts={**results.facts, "commit": self.commit})
        if self.json is not None:
            write_json(results, self.json)
        if self.csv is not None:
            write_csv(results, self.csv)
        if self.plot is not None:
            draw([results, *map(read_results, self.beside)], self.plot)
        show(Console(), results)


def check_can_write(path: Path) -> None:
    """Raise `ConfigError` for a file that could not be written."""
    if not path.parent.is_dir():
        raise ConfigError(f"The folder {str(path.parent)!r} of {str(path)!r} does not exist; make it, or name another file.")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{str(path)!r} cannot be written: it is a folder, or not yours to write; name another file.")


def _outputs(
    json: Annotated[Path | None, typer.Option(help="Write the results to this file.", show_default=False)] = None,
    csv: Annotated[Path | None, typer.Option(help="Write one line a point to this file.", show_default=False)] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them: .png, .svg or .pdf. Needs pagedcore[plot].", show_default=False)] = None,
    beside: Annotated[
        list[Path] | None, typer.Option(help="Earlier --json file to draw in the same plot. May be repeated.", show_default=False)
    ] = None,
    label: Annotated[str | None, typer.Option(help="Name of this run in plots; None is engine and version.", show_default=False)] = None,
    commit: Annotated[
        str | None,
        typer.Option(help="Commit of the sources, written down where they are no git checkout that tells it.", show_default=False),
    ] = None,
) -> Outputs:
    return Outputs(json=json, csv=csv, plot=plot, beside=tuple(beside or ()), label=label, commit=commit)


def takes_output_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command whose first parameter is an `Outputs`: it gets these flags instead, after its own."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    flags = list(inspect.signature(_outputs, eval_str=True).parameters.values())

    def run(*first: Any, **values: Any) -> None:
        given = {flag.name: values.pop(flag.name) for flag in flags}
        command(_outputs(**given), *first, **values)

    parameters = [*own, *(flag.replace(kind=inspect.Parameter.KEYWORD_ONLY) for flag in flags)]
    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
