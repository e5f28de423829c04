"""By how much a pool was fuller than it is now, since each block was last used."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class Peaks:
    """Owns a height for each stamp: a staircase that falls from old stamps to new ones, with few steps.

    Of the blocks that a pool has to hold beside one of a stamp, some leave nothing behind, so it may have held more of them than there
    are now. The height is the most of them since that stamp, less what came meanwhile and is there now: the sum of both is
    what a pool must have had room for. Example, with one such block at first, then 5, and 2 new blocks that stay:

    - `raise_to(1, last_stamp=10)`: 1 for stamps up to 10, and 0 for later ones;
    - `raise_to(5, last_stamp=20)`: 5 up to 20;
    - `lower([], 2, 1)`: 3 up to 20, since 2 of the 5 places are taken by what stays;
    - `lower([15], 0, 1)`: the block of stamp 15 is in use again, so it is beside those of later stamps, and was beside those of earlier
      ones before: 3 up to 15, and 2 for 16 to 20.
    """

    def __init__(self) -> None:
        self._stamps = [0]
        self._heights = [0.0]

    def at(self, stamp: int) -> float:
        """The height for a stamp."""
        return self._heights[bisect_right(self._stamps, stamp) - 1]

    def raise_to(self, height: float, last_stamp: int) -> None:
        """There are so many now, seen by all stamps up to the last one that was given."""
        first = last_stamp + 1
        while self._heights and self._heights[-1] <= height:
            first = self._stamps.pop()
            self._heights.pop()
        if first <= last_stamp and height:
            self._add(first, height)
            first = last_stamp + 1
        self._add(first, 0.0)

    def lower(self, used: Sequence[int], num_new: int, weight: int) -> None:
        """Blocks got an owner, each of which stands for `weight` blocks: new ones, and those of the stamps `used`, in order."""
        num_new_blocks, highest = num_new * weight, self._heights[0]
        if not highest:
            return
        used = used[: int(max(0.0, highest - num_new_blocks)) // weight + 1]  # at later ones it is 0 already
        stamps = sorted({*self._stamps, *(one + 1 for one in used)})
        heights = [max(0.0, self.at(stamp) - num_new_blocks - weight * bisect_left(used, stamp)) for stamp in stamps]
        self._stamps, self._heights = [], []
        for stamp, height in zip(stamps, heights, strict=True):
            if not self._heights or height < self._heights[-1]:
                self._add(stamp, height)

    def _add(self, stamp: int, height: float) -> None:
        self._stamps.append(stamp)
        self._heights.append(height)
