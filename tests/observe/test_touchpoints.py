"""What we use of prometheus_client beyond its public interface still does what we rely on."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from pagedcore.observe.ledger import PendingHistogram
from pagedcore.observe.prometheus import add_observations, is_multiprocess, set_exemplar

BUCKETS = (0.5, 1.0, 2.0)
VALUES = [0.1, 0.5, 0.5, 0.75, 1.0, 2.0, 2.5, 100.0]


def test_adding_many_observations_equals_observing_each() -> None:
    texts = []
    for in_bulk in (False, True):
        registry = CollectorRegistry()
        histogram = Histogram("h", "Help.", ["name"], registry=registry, buckets=BUCKETS).labels("x")
        if in_bulk:
            pending = PendingHistogram(BUCKETS)
            for value in VALUES:
                pending.observe(value)
            add_observations(histogram, pending.counts, pending.total)
        else:
            for value in VALUES:
                histogram.observe(value)
        texts.append([line for line in generate_latest(registry).decode().splitlines() if "_created" not in line])
    assert texts[0] == texts[1]


def test_this_process_knows_that_it_is_not_a_multi_process_set_up() -> None:
    assert is_multiprocess() is False


def test_an_exemplar_stands_at_its_bucket_as_one_of_observe_does() -> None:
    texts = []
    for is_ours in (False, True):
        registry = CollectorRegistry()
        histogram = Histogram("h", "Help.", registry=registry, buckets=BUCKETS)
        if is_ours:
            add_observations(histogram, {1: 1}, 0.75)
            set_exemplar(histogram, 1, 0.75, "abc")
        else:
            histogram.observe(0.75, {"trace_id": "abc"})
        texts.append([line.rsplit(" ", 1)[0] for line in openmetrics(registry).decode().splitlines() if "#" in line and "le=" in line])
    assert texts[0] == texts[1] == ['h_bucket{le="1.0"} 1.0 # {trace_id="abc"} 0.75']
