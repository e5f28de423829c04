"""Tensors go through two buffers in turns, each waited for before it is filled again. The device is a fake, and lags behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedcore.models import device_upload
from pagedcore.models.device_upload import DeviceUpload

PIECE_BYTES = 1 << 20


class LaggingDevice:
    """Queued copies run when an event behind them is waited for, or at the end."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.streams: list[object] = []

    def run(self, length: int | None = None) -> None:
        count = len(self.queue) if length is None else length
        for copy in self.queue[:count]:
            copy()
        self.queue[:count] = [lambda: None] * count


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LaggingDevice:
    lagging, empty, copy = LaggingDevice(), torch.empty, Tensor.copy_

    class Event:
        length = 0

        def record(self, stream: object) -> None:
            lagging.streams.append(stream)
            self.length = len(lagging.queue)

        def synchronize(self) -> None:
            lagging.run(self.length)

    def copy_later(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            return copy(self, source)
        lagging.queue.append(lambda: copy(self, source))
        return self

    def pageable(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return empty(*sizes, **options)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(device_upload.torch, "empty", pageable)
    monkeypatch.setattr(Tensor, "copy_", copy_later)
    return lagging


def test_every_value_arrives_whatever_the_size(device: LaggingDevice) -> None:
    upload = DeviceUpload(torch.device("cpu"), PIECE_BYTES)
    tensors = [torch.randint(0, 100, (size,), dtype=torch.int32) for size in (0, 7, PIECE_BYTES // 4, PIECE_BYTES // 4 + 1, PIECE_BYTES)]
    tensors.append(torch.randn(900, 701).t())
    arrived = [upload(tensor) for tensor in tensors]
    device.run()
    assert all(torch.equal(one, tensor) for one, tensor in zip(arrived, tensors, strict=True))
    assert set(device.streams) == {"the stream of cpu"}


def test_without_the_wait_pieces_would_be_lost_here(device: LaggingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above sees a buffer that is filled while it is read."""
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: None)
    tensor = torch.arange(4 * PIECE_BYTES // 4, dtype=torch.int32)
    arrived = DeviceUpload(torch.device("cpu"), PIECE_BYTES)(tensor)
    device.run()
    assert not torch.equal(arrived, tensor)
