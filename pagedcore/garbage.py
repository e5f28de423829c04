"""Python's garbage collector and engines: a full collection walks over every object of the process, and halts all threads meanwhile.

With torch loaded that takes tenths of a second, in which no step is planned. What exists when an engine becomes ready lives
about as long as the engine, so it is left out of collections until the last engine of the process has ended.
"""

from __future__ import annotations

import gc

_frozen_for: set[GarbageHold] = set()


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

    def release(self) -> None:
        """After the last engine everything is collected as before, also what the host has frozen itself. Nothing if nothing was taken."""
        if self in _frozen_for:
            _frozen_for.discard(self)
            if not _frozen_for:
                gc.unfreeze()
