"""Progress of a run as calls of a `Progress`."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from pagedcore.models.progress import Progress


def counter(what: str, total: int, progress: Progress) -> Callable[[], None]:
    """To be called as each of `total` ends."""
    numbers = itertools.count(1)
    progress(what, 0, total)
    return lambda: progress(what, next(numbers), total)
