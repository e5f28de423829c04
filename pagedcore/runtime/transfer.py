"""Small tensors between host and device, without making the host wait."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` as a tensor on `device`. On CUDA the copy is queued from pinned memory and does not wait."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def array_to_device(values: array[int], device: torch.device) -> Tensor:
    """The same for many numbers, which Python's lists are slow to give out; int32."""
    host = torch.frombuffer(values, dtype=torch.int32)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def words_to_device(words: bytearray, num_rows: int, device: torch.device) -> Tensor:
    """The bytes of 32-bit words as [num_rows, W] int32, copied in the same way."""
    host = torch.frombuffer(words, dtype=torch.int32).view(num_rows, -1)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class HostCopy:
    """Owns host copies of device tensors, and the event that says when they are there."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._tensors = {name: _start_copy(tensor) for name, tensor in tensors.items()}
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> dict[str, Tensor]:
        """The host tensors. Waits for the device. Raises what the device reports."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _start_copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
