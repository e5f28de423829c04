"""Copies of KV blocks in host memory, and the way there and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pagedcore.swap.pinned import PinnedMemory

STAGING_BYTES = 64 << 20
"""Of device memory, through which blocks travel: large enough that the way takes no longer for it."""

Copy = tuple[int, int]
"""(device block, host block)."""


class HostBlocks:
    """Owns the host blocks, [num_host_blocks, num_layers, words of a block], and the staging buffer on the device.

    Everything is queued on the current stream, in order, and nothing waits: copies are as much ahead of the host as the steps
    that they belong to. A block's layers are gathered on the device first, so that neighbouring host blocks travel in one copy.
    """

    def __init__(self, cache: Tensor, num_host_blocks: int) -> None:
        """`cache` is the device's pool, [num_layers, num_blocks, ...]. Raises RuntimeError where host memory cannot be locked."""
        self._device = cache.device
        self._blocks = _words(cache).transpose(0, 1)  # [num_blocks, L, words of a block in a layer], a view
        self._host = torch.empty(num_host_blocks, *self._blocks.shape[1:], dtype=self._blocks.dtype)
        num_staged = num_staged_blocks(self._blocks[0].nbytes, num_host_blocks)
        self._staging = torch.empty(num_staged, *self._blocks.shape[1:], dtype=self._blocks.dtype, device=self._device)
        self._pinned = PinnedMemory(self._host) if self._device.type == "cuda" else None
        self._done = torch.cuda.Event() if self._device.type == "cuda" else None

    def copy_out(self, copies: Sequence[Copy]) -> None:
        """What the device's blocks hold now goes to the host blocks."""
        for part in self._parts(copies):
            staged = self._staging[: len(part)]
            torch.index_select(self._blocks, 0, self._block_ids(part), out=staged)
            for first, host_ids in _runs(part):
                neighbours = self._host[host_ids.start : host_ids.stop]
                neighbours.copy_(staged[first : first + len(host_ids)], non_blocking=True)
        self._note_work()

    def copy_in(self, copies: Sequence[Copy]) -> None:
        """What the host blocks hold goes to the device's."""
        for part in self._parts(copies):
            staged = self._staging[: len(part)]
            for first, host_ids in _runs(part):
                staged[first : first + len(host_ids)].copy_(self._host[host_ids.start : host_ids.stop], non_blocking=True)
            self._blocks.index_copy_(0, self._block_ids(part), staged)
        self._note_work()

    def close(self) -> None:
        """Wait for the last copy and give all memory back, the device's too. It cannot be used afterwards."""
        if self._done is not None:
            self._done.synchronize()
        if self._pinned is not None:
            self._pinned.close()
        for name in ("_blocks", "_host", "_staging", "_pinned"):
            self.__dict__.pop(name, None)

    def _parts(self, copies: Sequence[Copy]) -> Iterator[list[Copy]]:
        """By host block, as many at a time as the staging buffer holds."""
        ordered, size = sorted(copies, key=lambda copy: copy[1]), len(self._staging)
        for first in range(0, len(ordered), size):
            yield ordered[first : first + size]

    def _block_ids(self, part: Sequence[Copy]) -> Tensor:
        ids = torch.tensor([block_id for block_id, _ in part], dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return ids.to(self._device, non_blocking=True)

    def _note_work(self) -> None:
        if self._done is not None:
            self._done.record()


def num_staged_blocks(block_bytes: int, num_host_blocks: int) -> int:
    """Blocks that travel at a time: what `STAGING_BYTES` hold, and one at least."""
    return max(1, min(num_host_blocks, STAGING_BYTES // block_bytes))


def _words(cache: Tensor) -> Tensor:
    """[num_layers, num_blocks, words], a view in the widest integers that a block's bytes are made of: fewer elements to gather."""
    num_bytes = cache[0, 0].nbytes
    dtype = next(dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) if num_bytes % dtype.itemsize == 0)
    return cache.view(torch.uint8).flatten(2).view(dtype)


def _runs(part: Sequence[Copy]) -> Iterator[tuple[int, range]]:
    """(index of the first, host blocks) of each stretch of neighbours; `part` is in the order of host blocks."""
    first = 0
    for index in range(1, len(part) + 1):
        if index == len(part) or part[index][1] != part[index - 1][1] + 1:
            yield first, range(part[first][1], part[index - 1][1] + 1)
            first = index
