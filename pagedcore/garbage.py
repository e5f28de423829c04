"""Python's garbage collector and engines: a full collection walks over every object of the process, and halts all threads meanwhile.

With torch loaded that takes tenths of a second, in which no step is planned. What exists when an engine becomes ready lives
about as long as the engine, so it is left out of collections until the last engine of the process has ended. So long the young
objects are collected less often, too: Python does so after 700 of them, which hundreds of streams make in a step or two.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000
"""Made, and not gone yet, when the next collection of young objects is due."""

_frozen_for: set[GarbageHold] = set()
_young_of_host: list[int] = []
"""How many were due before the first hold, where the host had left it at fewer."""


class GarbageHold:
    """One engine's wish that what exists now is not walked over again. `take` and `release` may be called twice, from any thread.

    There is no lock: collecting may end a forgotten engine, and wait for its thread, which releases. Two threads that meet here
    freeze too little at worst.
    """

    def take(self) -> None:
        """Collect once, then leave out of later collections whatever is there."""
        if self not in _frozen_for:
            _frozen_for.add(self)
            gc.collect()
            gc.freeze()
            _collect_less_often()

    def release(self) -> None:
        """After the last engine everything is collected as before, also what the host has frozen itself. Nothing if nothing was taken."""
        if self in _frozen_for:
            _frozen_for.discard(self)
            if not _frozen_for:
                gc.unfreeze()
                _collect_as_the_host()


def _collect_less_often() -> None:
    """A host that has set more, or 0 for never, is left alone."""
    young, *older = gc.get_threshold()
    if 0 < young < YOUNG_OBJECTS:
        _young_of_host[:] = [young]
        gc.set_threshold(YOUNG_OBJECTS, *older)


def _collect_as_the_host() -> None:
    """A host that has set something else meanwhile is left alone."""
    young, *older = gc.get_threshold()
    of_host, _young_of_host[:] = _young_of_host[:], []
    if of_host and young == YOUNG_OBJECTS:
        gc.set_threshold(of_host[0], *older)
