"""How much fuller a pool was since a block was last used: the staircase against a count of each block's own."""

from __future__ import annotations

import random

import pytest

from pagedcore.advice.peaks import Peaks


def test_the_example_of_the_docstring() -> None:
    peaks = Peaks()
    peaks.raise_to(1, last_stamp=10)
    assert [peaks.at(stamp) for stamp in (1, 10, 11)] == [1, 1, 0]
    peaks.raise_to(5, last_stamp=20)
    assert [peaks.at(stamp) for stamp in (1, 10, 20, 21)] == [5, 5, 5, 0]
    peaks.lower([], 2, 1)
    assert [peaks.at(stamp) for stamp in (1, 20, 21)] == [3, 3, 0]
    peaks.lower([15], 0, 1)
    assert [peaks.at(stamp) for stamp in (1, 15, 16, 20, 21)] == [3, 3, 2, 2, 0]


def test_a_block_released_after_the_peak_knows_nothing_of_it() -> None:
    peaks = Peaks()
    peaks.raise_to(7, last_stamp=3)
    peaks.raise_to(2, last_stamp=5)
    assert [peaks.at(stamp) for stamp in (3, 4, 5, 6)] == [7, 2, 2, 0]


@pytest.mark.parametrize("weight", [1, 2, 8])
def test_each_height_is_what_a_look_at_each_block_finds(weight: int) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        peaks, heights, stamp = Peaks(), dict[int, float](), 0
        for _ in range(120):
            kind = rng.randrange(3)
            if kind == 0:
                for _ in range(rng.randrange(4)):
                    stamp += 1
                    heights[stamp] = 0.0
            elif kind == 1:
                height = rng.choice((0, 1, 3, rng.randrange(40), rng.random() * 20))
                peaks.raise_to(height, stamp)
                heights = {one: max(found, height) for one, found in heights.items()}
            else:
                used = sorted(rng.sample(sorted(heights), rng.randrange(min(len(heights), 5) + 1)))
                num_new = rng.randrange(4)
                peaks.lower(used, num_new, weight)
                heights = {one: max(0.0, found - weight * (num_new + sum(other < one for other in used))) for one, found in heights.items()}
                heights = {one: found for one, found in heights.items() if one not in used}
            assert {one: peaks.at(one) for one in heights} == pytest.approx(heights)
            assert peaks._heights == sorted(set(peaks._heights), reverse=True)
            assert peaks._stamps == sorted(set(peaks._stamps))
