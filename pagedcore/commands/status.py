"""`pagedcore status`: the five indicators of a running server, as tables or as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagedcore.commands.remote import ask_server
from pagedcore.console.findings import findings
from pagedcore.console.indicators import Indicator, Targets, indicators

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_STYLES = {"good": "green", "attention": "bold red", "idle": "dim"}


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine of a server."""

    engine: str
    model: str
    indicators: list[Indicator]
    findings: list[str]
    """What stands out beside them."""

    @property
    def needs_attention(self) -> bool:
        return any(indicator.verdict == "attention" for indicator in self.indicators)


def read_status(url: str, api_key: str | None, targets: Targets) -> list[EngineStatus]:
    """Ask a server. Raises `ConfigError` for what is no URL of one, `EngineClosedError` when it does not answer, and
    `AuthenticationError` or `OperatorOnlyError` when the key will not do."""
    engines = ask_server(url, "/v1/stats", api_key)["data"]
    return [EngineStatus(stats["engine"], stats["model"], indicators(stats, targets), findings(stats, targets)) for stats in engines]


def as_json(engines: list[EngineStatus]) -> dict[str, Any]:
    """The same content as the tables."""
    return {
        "needs_attention": any(engine.needs_attention for engine in engines),
        "engines": [{**dataclasses.asdict(engine), "needs_attention": engine.needs_attention} for engine in engines],
    }


def show(console: Console, engines: list[EngineStatus]) -> None:
    """Print a table an engine, then what to do."""
    for engine in engines:
        console.print(_table(engine))
        for indicator in engine.indicators:
            if indicator.next_step:
                console.print(f"  [bold]{indicator.name}[/bold]: {indicator.next_step}", highlight=False)
        for finding in engine.findings:
            console.print(f"  {finding}", highlight=False, markup=False)


def _table(engine: EngineStatus) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"engine {escape(engine.engine)}: {escape(engine.model)}", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("value", no_wrap=True, justify="right")
    table.add_column("target")
    table.add_column("verdict", no_wrap=True)
    table.add_column("of")
    for one in engine.indicators:
        table.add_row(one.name, one.shown, one.target, f"[{_STYLES[one.verdict]}]{one.verdict}[/]", one.note)
    return table
