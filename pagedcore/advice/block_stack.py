"""The LRU stack of one block size: how large a pool would still have held a block."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagedcore.advice.peaks import Peaks
from pagedcore.advice.sampling import MAX_LEVEL, highest_level, sample


@dataclass(slots=True, eq=False)
class Tracked:
    """One sampled block. `stamp` is when it was last used, in uses."""

    key: int
    stamp: int = 0
    num_owners: int = 0


@dataclass(slots=True)
class Found:
    """What one lookup found; with sampling an estimate."""

    num_known_tokens: int = 0
    """Leading tokens whose blocks had been computed before."""
    depths: list[float] | None = None
    """Of each sampled block among them, the blocks that a pool must have to hold it and all before it."""


class BlockStack:
    """Owns the sampled blocks of one size and the order in which they were used.

    A block leaves an LRU pool when the blocks with an owner and those released after it fill the pool. So its depth is::

        cached:  1 + blocks released later + blocks with an owner + peak
        owned:   blocks with an owner + peak, or 1 + blocks used later + peak where that is less: a pool too small for all
                 that ran together would have run them one after another

    Blocks that nobody can find, such as partly filled ones, leave nothing behind when their request ends, so a pool may have been
    fuller than it is: `peak` is by how much since the block was last used, less the blocks that came since.

    `hit_tokens[i]` are tokens that pools of at least `capacities[i]` blocks serve and smaller ones do not; the last entry is
    what only an unbounded pool serves. When more than `max_tracked` blocks are remembered, those out of reach of the largest
    capacity go, and if that is not enough half as many are sampled. Hits are contiguous by themselves: a pool evicts leaves
    first, so no block lies deeper than one behind it.
    """

    def __init__(self, block_size: int, capacities: Iterable[int], max_tracked: int) -> None:
        self.block_size = block_size
        self.capacities = sorted(capacities)
        self.hit_tokens = [0] * (len(self.capacities) + 1)
        self.level = 0
        self._max_tracked = max_tracked
        self._crowded_tokens = [0] * (len(self.capacities) + 1)
        self._num_eligible_tokens = 0
        self._num_sampled_tokens = 0
        self._tracked: dict[int, Tracked] = {}
        self._cached: list[int] = []
        self._owned: list[int] = []
        self._stamp = 0
        self._peaks = Peaks()

    @property
    def num_tracked(self) -> int:
        return len(self._tracked)

    def note_private(self, num_blocks: float) -> None:
        """Blocks that nobody can find, now."""
        self._peaks.raise_to(num_blocks, self._stamp)

    def depth(self, block: Tracked) -> float:
        """Blocks that a pool must have to still hold the block."""
        num_later = len(self._cached) - bisect_right(self._cached, block.stamp)
        num_owned, peak = len(self._owned), self._peaks.at(block.stamp)
        if block.num_owners:
            num_later += num_owned - bisect_right(self._owned, block.stamp)
            return min(num_owned << self.level, 1 + (num_later << self.level)) + peak
        return 1 + (num_later + num_owned << self.level) + peak

    def sample(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """(number, key) of the sampled blocks among those with these keys."""
        return [(number, keys[number]) for number in sample(keys, self.level)]

    def look_up(self, sampled: Sequence[tuple[int, int]], num_prompt_tokens: int, *, reads_cache: bool) -> Found:
        """Count what each capacity would have served of a prompt, whose last token is always computed."""
        num_eligible = (num_prompt_tokens - 1) // self.block_size
        eligible = [block for block in sampled if block[0] < num_eligible]
        tokens_each = self.block_size << self.level
        self._num_eligible_tokens += num_eligible * self.block_size
        self._num_sampled_tokens += len(eligible) * tokens_each
        depths, found = list[float](), Found()
        for number, key in eligible if reads_cache else ():
            block = self._tracked.get(key)
            if block is None:
                break
            depths.append(max(self.depth(block), depths[-1] if depths else 0.0))
            self.hit_tokens[bisect_left(self.capacities, depths[-1])] += tokens_each
            found.num_known_tokens = (number + 1) * self.block_size
        found.depths = depths
        return found

    def count_crowding(self, num_private_blocks: float, num_prompt_tokens: int, *, pool_share: float) -> None:
        """Note how much ran together when these prompt tokens had been admitted: it has to fit `pool_share` of each capacity."""
        num_running_blocks = ((len(self._owned) << self.level) + num_private_blocks) / pool_share
        self._crowded_tokens[bisect_left(self.capacities, num_running_blocks)] += num_prompt_tokens

    def own(self, sampled: Sequence[tuple[int, int]]) -> list[Tracked]:
        """Add an owner to each sampled block, the first one becoming the newest; returns them in order."""
        blocks = [self._tracked_at(key) for _, key in sampled]
        unowned = [block.stamp for block in blocks if not block.num_owners]
        used = sorted(stamp for stamp in unowned if stamp)
        self._peaks.lower(used, len(unowned) - len(used), 1 << self.level)
        for block in reversed(blocks):
            if block.num_owners:
                _drop(self._owned, block.stamp)
            elif block.stamp:
                _drop(self._cached, block.stamp)
            block.num_owners += 1
            self._use(block)
        return blocks

    def release(self, blocks: Sequence[Tracked]) -> None:
        """Take an owner from each block of a table: the head becomes the newest."""
        for block in reversed(blocks):
            if self._tracked.get(block.key) is block:
                block.num_owners -= 1
                if not block.num_owners:
                    _drop(self._owned, block.stamp)
                    self._use(block)

    def forget_cached(self) -> None:
        """Every block without an owner is gone."""
        self._tracked = {key: block for key, block in self._tracked.items() if block.num_owners}
        self._cached = []

    def shrink(self) -> None:
        """Keep to `max_tracked`."""
        if len(self._tracked) <= self._max_tracked:
            return
        num_reached = self.capacities[-1] >> self.level
        oldest = self._cached[-num_reached] if 0 < num_reached < len(self._cached) else 0
        kept = [block for block in self._tracked.values() if block.stamp >= oldest or block.num_owners]
        while len(kept) > self._max_tracked * 3 // 4 and self.level < MAX_LEVEL:
            self.level += 1
            kept = [block for block in kept if highest_level(block.key) >= self.level]
        self._tracked = {block.key: block for block in kept}
        self._cached = sorted(block.stamp for block in kept if not block.num_owners)
        self._owned = sorted(block.stamp for block in kept if block.num_owners)

    def hit_rates(self, num_prompt_tokens: int) -> list[float]:
        """The share of prompt tokens that each capacity serves, and at last an unbounded pool.

        What sampling found too little or too much belongs to blocks that are used all the time, which any pool holds.
        """
        found = self._num_eligible_tokens - self._num_sampled_tokens
        rates = []
        for tokens in self.hit_tokens:
            found += tokens
            rates.append(min(max(found, 0), self._num_eligible_tokens) / num_prompt_tokens)
        return rates

    def crowded_shares(self, num_prompt_tokens: int) -> list[float]:
        """The share of prompt tokens at whose admission each capacity could not have held what ran together."""
        return [sum(self._crowded_tokens[index + 1 :]) / num_prompt_tokens for index in range(len(self.capacities))]

    def _tracked_at(self, key: int) -> Tracked:
        found = self._tracked.get(key)
        if found is None:
            found = self._tracked[key] = Tracked(key)
        return found

    def _use(self, block: Tracked) -> None:
        self._stamp = block.stamp = self._stamp + 1
        insort(self._owned if block.num_owners else self._cached, block.stamp)


def _drop(stamps: list[int], stamp: int) -> None:
    index = bisect_left(stamps, stamp)
    assert stamps[index] == stamp, f"stamp {stamp} is not in the order"
    del stamps[index]
