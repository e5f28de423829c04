"""Locking host memory, so that a CUDA device copies to it and from it by itself."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class PinnedMemory:
    """Owns the lock on one host tensor's memory, until `close` or until it is forgotten; the tensor lives as long.

    Torch's own pinned memory comes in powers of two and stays with the process: a tier of 5 GiB would take 8, for good.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Raises RuntimeError where the system does not lock that much."""
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)))
        self._unlock = weakref.finalize(self, _unlock, tensor)
        self._unlock.atexit = False  # the driver may have gone before

    def close(self) -> None:
        """The device must be done with the memory. May be called twice."""
        self._unlock()


def _unlock(tensor: Tensor) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())))
