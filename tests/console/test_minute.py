"""The last minute, second by second."""

from __future__ import annotations

import pytest

from pagedcore.console.minute import Minute, percentile


def make_minute(*moments_s: float) -> Minute[list[float]]:
    """Each moment is noted in its second."""
    minute: Minute[list[float]] = Minute(list)
    for moment_s in moments_s:
        minute.at(moment_s).append(moment_s)
    return minute


def test_moments_of_one_second_are_counted_together_and_empty_seconds_are_left_out() -> None:
    assert make_minute(100.0, 100.9, 103.2).until(103.9) == [[100.0, 100.9], [103.2]]


def test_the_current_second_and_the_59_before_it_are_the_minute() -> None:
    minute = make_minute(100.5, 101.0)
    assert minute.until(159.999) == [[100.5], [101.0]]
    assert minute.until(160.0) == [[101.0]]
    assert minute.until(161.0) == []


def test_what_comes_late_counts_in_the_latest_second() -> None:
    assert make_minute(101.0, 100.9).until(101.0) == [[101.0, 100.9]]


def test_noting_forgets_too_so_that_nothing_piles_up_where_nobody_looks() -> None:
    assert len(make_minute(*map(float, range(1000)))._seconds) == 60


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.0), (0.51, 3.0), (0.99, 4.0), (1.0, 4.0)])
def test_a_percentile_is_the_smallest_value_that_its_share_does_not_exceed(share: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], share) == value


def test_of_nothing_there_is_no_percentile() -> None:
    assert percentile([], 0.5) is None
