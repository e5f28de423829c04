"""What becomes of engines when their process ends, and when it is forked."""

from __future__ import annotations

import atexit
import itertools
import os
import weakref
from typing import Protocol

from pagedcore.guard import Guard

EXIT_TIMEOUT_S = 5.0


class OfProcess(Protocol):
    """What belongs to the process that made it."""

    def close(self, timeout_s: float) -> None:
        """The process ends: let go of everything within this time. May come after another `close`."""
        ...

    def disown(self) -> None:
        """This is a forked child, alone with its one thread: refuse everything, wait for nothing, leave what is the parent's alone."""
        ...


_numbers = itertools.count()
_living: weakref.WeakValueDictionary[int, OfProcess] = weakref.WeakValueDictionary()
"""In the order in which they were made."""


def belong_to_process(one: OfProcess) -> None:
    """Close it at the end of this process, later ones first, and disown it in each forked child. It may be forgotten before."""
    _living[next(_numbers)] = one


@atexit.register
def close_living() -> None:
    """What the end of the process does."""
    for one in reversed(list(_living.values())):
        Guard("An engine could not be closed at the end of its process.")(one.close, EXIT_TIMEOUT_S)


def disown_living() -> None:
    """What a fork does in the child."""
    for one in list(_living.values()):
        Guard("An engine of the parent could not be let go of in a forked child.")(one.disown)
    _living.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=disown_living)
