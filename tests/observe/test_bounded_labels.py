"""Names that callers choose cannot grow the number of series without limit."""

from __future__ import annotations

from typing import Any

from pagedcore.observe.labels import MAX_CLASSES, MAX_TENANTS, BoundedLabel
from support.observed import Engine, make_lookup


def test_the_first_values_keep_their_name_and_later_ones_are_other() -> None:
    label = BoundedLabel(2)
    assert [label.value(n) for n in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]


def test_no_name_is_the_empty_value_and_takes_no_place() -> None:
    label = BoundedLabel(1)
    assert [label.value(n) for n in (None, "", "a", None)] == ["", "", "a", ""]


def test_what_is_no_text_is_other_and_takes_no_place() -> None:
    label = BoundedLabel(1)
    odd: list[Any] = [["x"], {"x": 1}, 7, b"x", "x\ud800"]
    assert [label.value(name) for name in [*odd, "\U0001f600"]] == ["other"] * 5 + ["\U0001f600"]


def test_tenants_and_classes_beyond_their_bound_are_counted_together() -> None:
    engine = Engine()
    for i in range(MAX_TENANTS + 6):
        engine.serve(f"r{i}", make_lookup("a", tail=1), tenant=f"t{i}", request_class=f"c{i}")
    samples = engine.samples()
    queries = {k: v for k, v in samples.items() if k.startswith("pagedcore_prefix_cache_queries_tokens_total")}
    assert len(queries) == MAX_TENANTS + 2  # the named ones, "other" and ""
    assert engine.value("pagedcore_prefix_cache_queries_tokens_total", tenant="other") == 6 * 5
    assert engine.value("pagedcore_prefix_cache_queries_tokens_total", tenant="t0") == 5
    ended = {k for k in samples if k.startswith("pagedcore_requests_total") and "class=other" in k}
    assert sum(samples[k] for k in ended) == MAX_TENANTS + 6 - MAX_CLASSES
