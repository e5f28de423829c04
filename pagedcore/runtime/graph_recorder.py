"""Recording CUDA graphs in a process whose other engines go on working, on the same device or on others."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")

_recording_lock = threading.Lock()
"""Held while a graph is recorded and while memory is given back: torch allows one such thing in a process at a time."""

_device_locks: dict[torch.device, threading.Lock] = {}


def device_lock(device: torch.device) -> threading.Lock:
    """Held by whoever gives work to `device`. Products share a workspace there, so work on two streams must not overlap."""
    return _device_locks.setdefault(device, threading.Lock())


def give_back_memory(device: torch.device) -> None:
    """Wait for `device`, then free what torch holds and nobody uses. While an engine records graphs its next recording does this:
    a closing engine waits for no other, since what collects an engine as garbage may be the one that records.
    """
    if not _recording_lock.acquire(blocking=False):
        return
    try:
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
    finally:
        _recording_lock.release()


@functools.cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream on which graphs of `device` are recorded: libraries keep a workspace for each stream that they meet."""
    return torch.cuda.Stream(device)


class GraphRecorder:
    """Owns the memory pool of graphs that are replayed one after another: those recorded later find memory of earlier ones in it."""

    def __init__(self, device: torch.device, shortened: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._device = device
        self._shortened = shortened
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = recording_stream(device)
        self._has_recorded = False

    def record(self, step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """The work of `step` as a graph, and the tensors that a replay leaves. `step` runs before, once or twice, with `shortened` open.

        Other engines wait for the recording, not for the first run, which compiles kernels. The garbage is not collected, as
        `torch.cuda.graph` would do each time: that takes longer than recording.
        """
        with self._shortened():
            step()
        with _recording_lock, device_lock(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                if not self._has_recorded:
                    with self._shortened():
                        step()  # lets libraries allocate what they keep for the stream
                self._stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = step()
                finally:
                    graph.capture_end()
            self._has_recorded = True
        return graph, output
