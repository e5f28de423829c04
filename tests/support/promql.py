"""What a PromQL expression names, held against the catalogue of metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pagedcore.observe.catalogue import BASE_LABELS, FAMILIES, UNNAMED, Family

TARGET_LABELS = ("job", "instance")
"""What Prometheus adds to each series that it scrapes."""
OPEN_LABELS = ("tenant", "class", "adapter")
"""Their values are what callers name."""

_COMMENT = re.compile(r"#.*")
_SELECTOR = re.compile(r"(?<![\w:])(pagedcore[_:][\w:]*)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left)\s*\(([^)]*)\)")


def family_of(name: str) -> Family | None:
    """The family that a series belongs to: its own name, or a histogram's with its suffix."""
    base, _, suffix = name.rpartition("_")
    if suffix in ("bucket", "sum", "count") and base in FAMILIES and FAMILIES[base].kind == "histogram":
        return FAMILIES[base]
    family = FAMILIES.get(name)
    return None if family is None or family.kind == "histogram" else family


def series_names(expr: str) -> set[str]:
    """Every metric of ours that an expression reads, recorded ones included."""
    return {name for name, _ in _SELECTOR.findall(_COMMENT.sub("", expr))}


def grouped_by(expr: str) -> set[str]:
    """The labels that its sums keep."""
    return {label for word, labels in _GROUPING.findall(expr) if word == "by" for label in _names(labels)}


def faults(expr: str, recorded: frozenset[str] = frozenset()) -> list[str]:
    """What an expression names that no series has: a metric, a label, or the value of a label."""
    expr = _COMMENT.sub("", expr)
    known = {*BASE_LABELS, *TARGET_LABELS}
    found: list[str] = []
    for name, matchers in _SELECTOR.findall(expr):
        if name in recorded:
            known.update(label for family in FAMILIES.values() for label in family.labels)
            continue
        family = family_of(name)
        if family is None:
            found.append(f"no metric {name}")
            continue
        labels = {*family.labels, *(("le",) if name.endswith("_bucket") else ())}
        known |= labels
        found += _matcher_faults(name, family, labels, matchers)
    for _, labels in _GROUPING.findall(expr):
        found += [f"no label {label}" for label in _names(labels) if label not in known]
    return found


def _matcher_faults(name: str, family: Family, labels: set[str], matchers: str) -> Iterator[str]:
    for label, value in _MATCHER.findall(matchers):
        if label in (*BASE_LABELS, *TARGET_LABELS):
            continue
        if label not in labels:
            yield f"{name} has no label {label}"
        elif label not in OPEN_LABELS:
            values = {child[family.labels.index(label)] for child in family.children} - {UNNAMED}
            yield from (f"{name} has no {label} {part}" for part in value.split("|") if part not in values)


def _names(labels: str) -> list[str]:
    return [label.strip() for label in labels.split(",") if label.strip()]
