"""Progress of named steps, as bars on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pagedcore.models.progress import Progress


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yield progress(what, done, total): one bar for each `what`, in the order of their first calls. Any thread may call it."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield progress
