"""`pagedcore advise`: the cache advisor on a recorded trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pagedcore.advice.advice import Advice
from pagedcore.advice.offline import advise
from pagedcore.advice.reuse_sketch import POOL_FACTORS, CurvePoint
from pagedcore.advice.trace import read_trace
from pagedcore.readable import percent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HASH_DIGITS = 12


def advise_for(trace: Path, block_size: int, num_blocks: int) -> Advice:
    """Raises `ConfigError` for a trace that cannot be read."""
    return advise(read_trace(trace), block_size, num_blocks)


def show(console: Console, advice: Advice) -> None:
    """Print the sentences, then the numbers behind them."""
    for sentence in advice.sentences:
        console.print(sentence, highlight=False, markup=False)
    if advice.curve:
        console.print(_curve(advice.curve))
    if advice.costliest_prefixes:
        console.print(_prefixes(advice))


def _curve(curve: Sequence[CurvePoint]) -> Table:
    from rich.table import Table

    table = Table(title="predicted hit rate", title_justify="left")
    table.add_column("block size", justify="right")
    for factor in POOL_FACTORS:
        table.add_column(f"{factor:g}x", justify="right")
    for size in sorted({point.block_size for point in curve}):
        rates = {point.pool_factor: percent(point.hit_rate) for point in curve if point.block_size == size}
        table.add_row(str(size), *(rates.get(factor, "-") for factor in POOL_FACTORS))
    return table


def _prefixes(advice: Advice) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="prefixes that cost most recomputation", title_justify="left")
    for column in ("prefix", "tenant", "tokens", "recomputed tokens", "requests", "latest request"):
        table.add_column(column, overflow="fold")
    for prefix in advice.costliest_prefixes:
        tenant = "-" if prefix.tenant is None else escape(prefix.tenant)
        numbers = (prefix.num_tokens, prefix.recomputed_tokens, prefix.num_requests)
        table.add_row(prefix.prefix[:HASH_DIGITS], tenant, *(f"{number:,}" for number in numbers), escape(prefix.latest_request_id))
    return table
