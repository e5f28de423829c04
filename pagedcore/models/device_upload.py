"""Tensors from the page cache to a GPU: threads copy them into pinned memory while the piece before is on its way."""

from __future__ import annotations

from itertools import cycle

import torch
from torch import Tensor

PIECE_BYTES = 32 << 20
_SMALL_BYTES = 1 << 20
"""Up to here, as norms and biases are, tensors are left to the driver."""


class DeviceUpload:
    """Owns two pinned buffers of `piece_bytes` and the events that say when they may be filled again.

    Pages of a mapped file are read by all of torch's threads at once here; a copy straight from them runs on one, page fault by page fault.
    """

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pieces = cycle([(torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)])
        self._piece_bytes = piece_bytes

    def __call__(self, tensor: Tensor) -> Tensor:
        """A copy of the host's `tensor` on the device, in order with what is queued there."""
        if tensor.nbytes <= _SMALL_BYTES:
            return tensor.to(self._device)
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = (part.view(-1).view(torch.uint8) for part in (tensor.contiguous(), result))
        for start in range(0, tensor.nbytes, self._piece_bytes):
            self._send(source[start : start + self._piece_bytes], target[start : start + self._piece_bytes])
        return result

    def _send(self, source: Tensor, target: Tensor) -> None:
        buffer, is_free = next(self._pieces)
        is_free.synchronize()
        target.copy_(buffer[: len(source)].copy_(source), non_blocking=True)
        is_free.record(torch.cuda.current_stream(self._device))
