"""Progress of long preparations: the caller's callback, or a bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""progress(what, done, total): bytes of a fetch, tensors of a conversion."""

Advance = Callable[[int], None]
"""advance(done): how much is done by now."""


@contextmanager
def show_progress(what: str, total: int, progress: Progress | None, *, in_bytes: bool = False) -> Iterator[Advance]:
    """Yield a function to call with what is done; without `progress` it moves a bar on stderr."""
    if progress is not None:
        yield lambda done: progress(what, done, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    with Bar(TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def say(message: str) -> None:
    """One line to the user, on stderr."""
    sys.stderr.write(f"pagedcore: {message}\n")
    sys.stderr.flush()
