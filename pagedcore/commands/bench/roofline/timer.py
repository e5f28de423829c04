"""Microseconds of kernels on a CUDA device."""

# ruff: noqa: TID253 - only the command that needs a GPU imports this folder

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

GRAPH_US = 1500.0
"""A replay lasts at least so long, so that its start does not count."""
MAX_CALLS = 600
"""Of one graph."""

Call = Callable[[], object]


def time_replays(calls: Sequence[Call], estimate_us: float, num_rounds: int) -> list[float]:
    """Of one call, in each of so many replays of a graph that makes all calls equally often."""
    calls[0]()
    torch.cuda.synchronize()
    repeats = num_repeats(len(calls), estimate_us)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    return [us / (repeats * len(calls)) for us in time_calls(graph.replay, num_rounds)]


def num_repeats(num_calls: int, estimate_us: float) -> int:
    """How often a graph makes each of its calls."""
    return max(1, min(MAX_CALLS // num_calls, math.ceil(GRAPH_US / (estimate_us * num_calls))))


def time_calls(call: Call, num_rounds: int) -> list[float]:
    """Of each of so many calls; one before them is not counted."""
    call()
    return [_event_us(call) for _ in range(num_rounds)]


def _event_us(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
