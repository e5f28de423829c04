"""Counting many values at once is counting each of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcore.observe.ledger import PendingHistogram

BUCKETS = (0.5, 1.0, 2.0)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 9.0])))
def test_many_values_fall_into_the_buckets_of_each(values: list[float]) -> None:
    in_bulk, one_by_one = PendingHistogram(BUCKETS), PendingHistogram(BUCKETS)
    in_bulk.observe_many(values)
    for value in values:
        one_by_one.observe(value)
    assert in_bulk.counts == one_by_one.counts == Counter(bisect_left(BUCKETS, value) for value in values)
    assert in_bulk.total == pytest.approx(sum(values))
