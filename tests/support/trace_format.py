"""A strict reader of the Trace Event Format (JSON object form), for what we write of it."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

_KEYS = {
    "X": {"name", "ph", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "ph", "ts", "pid", "tid", "s", "args"},
    "C": {"name", "ph", "ts", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
}
_META_ARGS = {
    "process_name": ("name", str),
    "thread_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_sort_index": ("sort_index", int),
}


def check_trace(trace: dict[str, Any]) -> None:
    """Raises AssertionError where a viewer would drop something, or show it in the wrong place."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    for event in events:
        _check_event(event)
    tracks = {(event["pid"], event["tid"]) for event in events if event["ph"] in ("X", "i")}
    named = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    assert len(named) == len(set(named)), "a track has two names"
    assert tracks <= set(named), f"tracks without a name: {tracks - set(named)}"
    processes = [event["pid"] for event in events if event["name"] == "process_name"]
    assert sorted(processes) == sorted({event["pid"] for event in events}), "a process has no name, or two"
    _check_nesting(events)


def _check_event(event: dict[str, Any]) -> None:
    kind = event["ph"]
    assert set(event) == _KEYS[kind], event
    assert isinstance(event["name"], str)
    assert event["name"], event
    assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("pid", "tid")), event
    if kind == "M":
        name, of_type = _META_ARGS[event["name"]]
        assert set(event["args"]) == {name}, event
        assert isinstance(event["args"][name], of_type), event
        return
    assert isinstance(event["ts"], (int, float)), event
    assert math.isfinite(event["ts"]), event
    assert isinstance(event["args"], dict), event
    if kind == "X":
        assert event["dur"] >= 0, event
    if kind == "i":
        assert event["s"] in ("t", "p", "g"), event
    if kind == "C":
        assert event["args"], event
        assert all(isinstance(value, (int, float)) for value in event["args"].values()), event


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """Slices of one track nest or follow each other, in file order; viewers drop a slice that straddles another's end."""
    open_ends: dict[tuple[int, int], list[float]] = defaultdict(list)
    last_start: dict[tuple[int, int], float] = {}
    for event in events:
        if event["ph"] != "X":
            continue
        track, start, end = (event["pid"], event["tid"]), event["ts"], event["ts"] + event["dur"]
        assert start >= last_start.get(track, -math.inf), f"{event} begins before the slice ahead of it"
        last_start[track] = start
        ends = open_ends[track]
        while ends and ends[-1] <= start + 1e-3:
            ends.pop()
        assert not ends or end <= ends[-1] + 1e-3, f"{event} ends after the slice around it"
        ends.append(end)
